"""The choice whether compiled callables stay compiled. Does not import torch's compiler."""

from __future__ import annotations

import os

from amanda_core.driver_kit import NATIVE
from amanda_core.interface import ConfigError
from amanda_driver_torch.torch_internals.internals import RELEASE
from amanda_driver_torch.torch_internals.versions import GRAPHS_TRIED, are_graphs_tried

__all__ = ["FORWARD_ONLY", "AnalysisFailed", "CannotWeave", "misses_backward", "why_eager"]

_SETTING = "AMANDA_TORCH_COMPILED"
_VALUES = "graph", "forward", "eager"

#: Why tools do without the backward operators of compiled callables.
FORWARD_ONLY = f"{_SETTING}=forward is set"


class CannotWeave(Exception):
    """A reason why a graph cannot be instrumented, so that its frame must run eagerly."""


class AnalysisFailed(Exception):
    """An exception of a tool's analysis."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def misses_backward() -> bool:
    """Return True if tools do without the backward operators of compiled callables."""
    return _setting() == "forward"


def why_eager(interceptor: str) -> str:
    """Return why compiled callables run eagerly, or an empty string.

    Args:
        interceptor: Name of the interceptor of the eager operators around them.
    """
    if _setting() == "eager":
        return f"{_SETTING}=eager is set"
    if interceptor != NATIVE:
        return f"Dynamo cannot trace under the interceptor {interceptor}"
    if not are_graphs_tried(RELEASE):
        tried = ", ".join(GRAPHS_TRIED)
        return f"graphs of PyTorch {RELEASE} were not tried, only those of {tried}"
    return ""


def _setting() -> str:
    value = os.environ.get(_SETTING) or _VALUES[0]
    if value not in _VALUES:
        raise ConfigError(f"{_SETTING} must be one of {', '.join(_VALUES)}, but is {value!r}")
    return value
