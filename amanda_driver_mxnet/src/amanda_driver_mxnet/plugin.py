"""The pluggy plugin of MXNet's driver, named by the entry point ``amanda.drivers``.

Owns the driver's description and its hooks, and the check for configurations of MXNet in which
gradients are wrong. Uses MXNet only if it is imported already.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from amanda_core import Attachment, DriverInfo, DriverStatus, Finding, OpContext, Session, hookimpl
from amanda_core.errors import DriverError
from amanda_core.framework_versions import FrameworkVersions
from amanda_driver_mxnet.vocabulary import DECLARATIONS, describe

__all__ = [
    "amanda_attach",
    "amanda_driver_info",
    "amanda_driver_status",
    "amanda_preflight",
    "amanda_prepare_context",
]

VERSIONS = FrameworkVersions("MXNet", "mxnet", ("mxnet",), "1.9.1", "1.9.1", "amanda-driver-mxnet")


@hookimpl
def amanda_driver_info() -> DriverInfo:
    """Describe the driver."""
    return DECLARATIONS.info


@hookimpl
def amanda_preflight() -> Sequence[Finding]:
    """Look for problems of this environment that would make results wrong."""
    right = os.environ.get("MXNET_MKLDNN_ENABLED") == "0"
    if VERSIONS.describe() or right or os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        return VERSIONS.describe()
    return [
        Finding(
            "error",
            "With oneDNN (MKLDNN) and its threaded engine, MXNet computes wrong gradients in "
            "programs with custom functions (autograd.Function, CustomOp), and tools insert such "
            "functions",
            "Start Python with MXNET_MKLDNN_ENABLED=0, or with MXNET_ENGINE_TYPE=NaiveEngine",
        )
    ]


@hookimpl
def amanda_driver_status() -> DriverStatus:
    """Report which MXNet is installed, and whether tools can be applied."""
    for problem in amanda_preflight():
        return DriverStatus(VERSIONS.installed(), "", problem.message)
    return VERSIONS.status("python", "MXNet calls operators through Python functions")


@hookimpl
def amanda_attach(session: Session) -> Attachment | None:
    """Start intercepting in the calling thread; return None if MXNet is not imported."""
    # `mxnet` is in sys.modules from the start of its import; `api` is its last part.
    if not hasattr(sys.modules.get("mxnet"), "api"):
        return None
    for problem in amanda_preflight():
        raise DriverError(problem.message, where=VERSIONS.driver, fix=problem.fix)
    from amanda_driver_mxnet.attachment import MxnetAttachment

    return MxnetAttachment(session)


@hookimpl
def amanda_prepare_context(context: OpContext) -> None:
    """Set the common keys of the context of an MXNet op."""
    if context.namespace.startswith("mxnet/"):
        describe(context)
