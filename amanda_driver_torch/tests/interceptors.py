"""Tests that run under both of PyTorch's interceptors, and those that only one of them passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from amanda_driver_torch.torch_internals.versions import are_graphs_tried

__all__ = ["STAYS_COMPILED", "under_both_interceptors"]

#: Callables stay compiled only under the native interceptor, and not under every release.
STAYS_COMPILED = pytest.mark.skipif(
    not are_graphs_tried(torch.__version__), reason="this PyTorch's compiled callables run eagerly"
)


def under_both_interceptors(test: Callable[..., Any]) -> Callable[..., Any]:
    """Parametrize a test by the name of the interceptor; a run in pure Python leaves it out."""
    both = pytest.mark.parametrize("interceptor", ["native", "function_mode"])
    marked: Callable[..., Any] = pytest.mark.one_interceptor(both(test))
    return marked
