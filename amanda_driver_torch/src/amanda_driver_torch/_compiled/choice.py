"""The choice whether compiled callables stay compiled. Does not import torch's compiler."""

from __future__ import annotations

import os

from amanda_core.interceptors import NATIVE
from amanda_driver_torch._torch.internals import RELEASE
from amanda_driver_torch._torch.versions import GRAPHS_TRIED

__all__ = ["why_eager"]

_SETTING = "AMANDA_TORCH_COMPILED"


def why_eager(interceptor: str) -> str:
    """Return why compiled callables run eagerly, or an empty string.

    Args:
        interceptor: Name of the interceptor of the eager operators around them.
    """
    if os.environ.get(_SETTING, "graph") == "eager":
        return f"{_SETTING}=eager is set"
    if interceptor != NATIVE:
        return f"Dynamo cannot trace under the interceptor {interceptor}"
    release = ".".join(RELEASE.split(".")[:2])
    if release not in GRAPHS_TRIED:
        tried = ", ".join(GRAPHS_TRIED)
        return f"graphs of PyTorch {release} were not tried, only those of {tried}"
    return ""
