"""The pluggy plugin of MXNet's driver, named by the entry point ``amanda.drivers``.

Owns the driver's description and its hooks. Uses MXNet only if it is imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from amanda_core import Attachment, DriverInfo, DriverStatus, Finding, OpContext, Session, hookimpl
from amanda_driver_mxnet.environment import findings, require_right_gradients, status
from amanda_driver_mxnet.vocabulary import OP_TYPES, describe

__all__ = [
    "amanda_attach",
    "amanda_driver_info",
    "amanda_driver_status",
    "amanda_preflight",
    "amanda_prepare_context",
]

_CAPABILITIES = frozenset(
    {
        "gradients",
        "aligned_gradients",
        "late_gradients",
        "replace",
        "replace_backward",
        "autodiff",
        "observers",
        "steps",
        "scopes",
        "ordered",
        "facts",
    }
)


@hookimpl
def amanda_driver_info() -> DriverInfo:
    """Describe the driver."""
    return DriverInfo(
        api=2,
        name="mxnet",
        modules=("mxnet",),
        namespaces=("mxnet/*/eager", "mxnet/*/hybrid"),
        capabilities={
            "eager": _CAPABILITIES | {"eager", "scope_events", "calls"},
            "hybrid": _CAPABILITIES | {"graph"},
        },
        vocabulary=OP_TYPES,
    )


@hookimpl
def amanda_preflight() -> Sequence[Finding]:
    """Look for problems of this environment that would make results wrong."""
    return findings()


@hookimpl
def amanda_driver_status() -> DriverStatus:
    """Report which MXNet is installed, and whether tools can be applied."""
    return status()


@hookimpl
def amanda_attach(session: Session) -> Attachment | None:
    """Start intercepting in the calling thread; return None if MXNet is not imported."""
    # `mxnet` is in sys.modules from the start of its import; `api` is its last part.
    if not hasattr(sys.modules.get("mxnet"), "api"):
        return None
    require_right_gradients()
    from amanda_driver_mxnet.attachment import attach

    return attach(session)


@hookimpl
def amanda_prepare_context(context: OpContext) -> None:
    """Set the common keys of the context of an MXNet op."""
    if context.namespace.startswith("mxnet/"):
        describe(context)
