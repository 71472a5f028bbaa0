"""The installed MXNet, and the configurations of it in which gradients are wrong.

Owns the checks and their messages. It does not import MXNet.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence

from amanda_core import DriverStatus, Finding
from amanda_core.errors import DriverError

__all__ = ["findings", "installed", "require_right_gradients", "status"]

_OLDEST = "1.9.1"
_DRIVER = "amanda-driver-mxnet"


def installed() -> str | None:
    """Return the version of the installed MXNet; None if it is not installed."""
    try:
        return importlib.metadata.version("mxnet")
    except importlib.metadata.PackageNotFoundError:
        return None


def _problem() -> Finding | None:
    """Return why no tool may be applied in this environment, or None if tools may be."""
    version = installed()
    if version is None:
        return Finding(
            "error", "MXNet is not installed", "pip install 'amanda-driver-mxnet[mxnet]'"
        )
    if version != _OLDEST:
        message = (
            f"MXNet {version} is not {_OLDEST}, the only release that {_DRIVER} was tried with"
        )
        return Finding("error", message, f"pip install mxnet=={_OLDEST} 'numpy<1.24'")
    if os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine":
        return None
    if os.environ.get("MXNET_MKLDNN_ENABLED") == "0":
        return None
    return Finding(
        "error",
        "With oneDNN (MKLDNN) and its threaded engine, MXNet computes wrong gradients in programs "
        "with custom functions (autograd.Function, CustomOp), and tools insert such functions",
        "Start Python with MXNET_MKLDNN_ENABLED=0, or with MXNET_ENGINE_TYPE=NaiveEngine",
    )


def findings() -> Sequence[Finding]:
    """Return what in this environment would make results wrong."""
    problem = _problem()
    return [] if problem is None else [problem]


def require_right_gradients() -> None:
    """Refuse an environment in which MXNet's own gradients are wrong.

    Raises:
        DriverError: Says how to run instead.
    """
    problem = _problem()
    if problem is not None:
        raise DriverError(problem.message, where=_DRIVER, fix=problem.fix)


def status() -> DriverStatus:
    """Return the status that `amanda drivers` shows."""
    problem = _problem()
    if problem is not None:
        return DriverStatus(installed(), "", problem.message)
    return DriverStatus(installed(), "python", "MXNet calls operators through Python functions")
