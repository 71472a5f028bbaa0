"""The pluggy plugin of PyTorch's driver: what the entry point ``amanda.drivers`` names.

Owns the driver's description and the hooks. Imports torch only where torch is loaded already.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from amanda_core import Attachment, DriverInfo, Finding, OpContext, hookimpl
from amanda_driver_torch.vocabulary import BACKWARD_TYPES, OP_TYPES, describe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amanda_core import Session

__all__ = [
    "amanda_attach",
    "amanda_driver_info",
    "amanda_preflight",
    "amanda_prepare_context",
]


@hookimpl
def amanda_driver_info() -> DriverInfo:
    """Describe the driver."""
    return DriverInfo(
        name="pytorch",
        modules=("torch",),
        namespaces=("pytorch/*/eager",),
        capabilities=frozenset(
            {
                "eager",
                "gradients",
                "aligned_gradients",
                "replace",
                "replace_backward",
                "autodiff",
                "steps",
                "scopes",
                "scope_events",
                "recomputation",
            }
        ),
        vocabulary={**OP_TYPES, **BACKWARD_TYPES},
    )


@hookimpl
def amanda_preflight() -> Sequence[Finding]:
    """Look for what in this environment would make results wrong."""
    import importlib_metadata

    try:
        version = importlib_metadata.version("torch")
    except importlib_metadata.PackageNotFoundError:
        return [Finding("error", "torch is not installed", "pip install torch")]
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 4):
        return [Finding("error", f"torch {version} is older than 2.4", "pip install -U torch")]
    if "torch.nn.modules.module" not in sys.modules:
        return []
    from amanda_driver_torch._foreign import foreign

    return foreign()


@hookimpl
def amanda_attach(session: Session) -> Attachment | None:
    """Start intercepting in the calling thread; None where torch is not loaded."""
    if "torch" not in sys.modules:
        return None
    from amanda_driver_torch._attachment import TorchAttachment

    attachment = TorchAttachment(session)
    try:
        attachment.attach()
    except BaseException:
        attachment.detach()
        raise
    return attachment


@hookimpl
def amanda_prepare_context(context: OpContext) -> None:
    """Fill in the common words for an op of PyTorch."""
    if context.namespace.startswith("pytorch/"):
        describe(context)
