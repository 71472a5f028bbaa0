"""Plugin that the entry point ``amanda.drivers`` names: description and hooks.

It must not import the framework, so that programs that do not use the framework do not wait for it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from amanda_core import Attachment, DriverInfo, Finding, OpContext, Session, hookimpl
from amanda_driver_tinytape.vocabulary import OP_TYPES, describe

__all__ = ["amanda_attach", "amanda_driver_info", "amanda_preflight", "amanda_prepare_context"]


@hookimpl
def amanda_driver_info() -> DriverInfo:
    """Describe the driver. Tools learn which capabilities are missing."""
    return DriverInfo(
        api=2,
        name="tinytape",
        modules=("tinytape",),
        namespaces=("tinytape/*/eager",),
        capabilities=frozenset(
            {
                "eager",
                "gradients",
                "aligned_gradients",
                "late_gradients",
                "replace",
                "replace_backward",
                "autodiff",
                "observers",
                "steps",
                "ordered",
                "facts",
            }
        ),
        vocabulary=OP_TYPES,
    )


@hookimpl
def amanda_preflight() -> Sequence[Finding]:
    """Find problems of the installation that would make results wrong."""
    if importlib.util.find_spec("tinytape") is None:
        fix = "pip install --force-reinstall amanda-driver-tinytape, which it comes with"
        return [Finding("error", "tinytape is not installed", fix)]
    return []


@hookimpl
def amanda_attach(session: Session) -> Attachment | None:
    """Start intercepting, or return None if the framework is not loaded yet."""
    # The module is in sys.modules from the start of its import; `sgd` is defined last.
    if not hasattr(sys.modules.get("tinytape"), "sgd"):
        return None
    from amanda_driver_tinytape.attachment import attach

    return attach(session)


@hookimpl
def amanda_prepare_context(context: OpContext) -> None:
    """Add common operator types. The hook is called for the contexts of all drivers."""
    if context.namespace.startswith("tinytape/"):
        describe(context)
