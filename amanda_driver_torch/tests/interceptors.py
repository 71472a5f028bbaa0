"""Tests that run under both of PyTorch's interceptors, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

__all__ = ["under_both_interceptors"]


def under_both_interceptors(test: Callable[..., Any]) -> Callable[..., Any]:
    """Parametrize a test by the name of the interceptor; a run in pure Python leaves it out."""
    both = pytest.mark.parametrize("interceptor", ["native", "function_mode"])
    marked: Callable[..., Any] = pytest.mark.one_interceptor(both(test))
    return marked
