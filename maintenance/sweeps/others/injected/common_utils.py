"""Substitute for the file beside PyTorch's tests of functorch that the copies of them lack."""

import unittest
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.testing._internal.common_device_type import skip, xfail

__all__ = ["decorate", "expectedFailureIf", "saved_tensors_hooks_to_gm", "skip", "xfail"]


class Decorated(NamedTuple):
    """The tests of an operator that get a decorator; the names are PyTorch's."""

    op_name: str
    variant_name: str
    device_type: Any
    dtypes: Any
    decorator: Any


def decorate(
    op_name: str,
    variant_name: str = "",
    *,
    decorator: Any,
    device_type: Any = None,
    dtypes: Any = None,
) -> Decorated:
    """Return what gives the tests of an operator a decorator."""
    return Decorated(op_name, variant_name, device_type, dtypes, decorator)


def expectedFailureIf(condition: bool) -> Callable[[Any], Any]:
    """Return a decorator of tests that fail if `condition` holds."""
    return unittest.expectedFailure if condition else lambda test: test


def saved_tensors_hooks_to_gm(*args: Any) -> Any:
    """Skip a test of hooks that are graphs."""
    raise unittest.SkipTest("needs the file beside PyTorch's tests of functorch")
