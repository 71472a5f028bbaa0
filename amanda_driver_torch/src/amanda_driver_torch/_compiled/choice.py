"""The choice whether compiled callables stay compiled. Does not import torch's compiler."""

from __future__ import annotations

import os

import torch

from amanda_core.interceptors import NATIVE

__all__ = ["why_eager"]

_SETTING = "AMANDA_TORCH_COMPILED"
# The parts of Dynamo that are used are private. Each release must be tried.
_TRIED = ("2.13",)


def why_eager(interceptor: str) -> str:
    """Return why compiled callables run eagerly, or an empty string.

    Args:
        interceptor: Name of the interceptor of the eager operators around them.
    """
    chosen = os.environ.get(_SETTING, "eager")
    if chosen == "eager":
        return f"set {_SETTING}=graph to keep them compiled"
    if interceptor != NATIVE:
        return f"Dynamo cannot trace under the interceptor {interceptor}"
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in _TRIED:
        return f"graphs of PyTorch {version} were not tried, only those of {', '.join(_TRIED)}"
    return ""
