"""The pluggy plugin of JAX's driver, named by the entry point ``amanda.drivers``.

Owns the driver's description and its hooks. Uses JAX only if it is imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from amanda_core import Attachment, DriverInfo, DriverStatus, Finding, OpContext, Session, hookimpl
from amanda_core.framework_versions import FrameworkVersions
from amanda_driver_jax.vocabulary import DECLARATIONS, describe

__all__ = [
    "amanda_attach",
    "amanda_driver_info",
    "amanda_driver_status",
    "amanda_framework_imported",
    "amanda_preflight",
    "amanda_prepare_context",
]

#: `_jax_internals` lists the private names of this minor release.
VERSIONS = FrameworkVersions("JAX", "jax", ("jax",), "0.10", "0.10.99", "amanda-driver-jax")


@hookimpl
def amanda_driver_info() -> DriverInfo:
    """Describe the driver."""
    return DECLARATIONS.info


@hookimpl
def amanda_preflight() -> Sequence[Finding]:
    """Look for problems of this environment that would make results wrong."""
    return VERSIONS.describe()


@hookimpl
def amanda_driver_status() -> DriverStatus:
    """Report which JAX is installed."""
    return VERSIONS.status("python", "Operators pass through Primitive.bind")


@hookimpl
def amanda_framework_imported() -> None:
    """Add the key of trace caches: what is compiled before it exists is compiled again later."""
    if _is_loaded():
        import amanda_driver_jax._trace_keys  # noqa: F401  Importing it adds the key.


@hookimpl
def amanda_attach(session: Session) -> Attachment | None:
    """Start intercepting in the calling thread; return None if JAX is not imported."""
    if not _is_loaded():
        return None
    with VERSIONS.refusing_unknown():
        from amanda_driver_jax._attachment import JaxAttachment
    return JaxAttachment(session)


def _is_loaded() -> bool:
    # The module is in sys.modules from the beginning of its import; this name is added late.
    return hasattr(sys.modules.get("jax"), "make_user_context")


@hookimpl
def amanda_prepare_context(context: OpContext) -> None:
    """Set the common keys of the context of a JAX op."""
    if context.namespace.startswith("jax/"):
        describe(context)
