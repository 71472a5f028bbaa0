"""Substitute for the file beside PyTorch's tests of functorch that the copies of them lack."""

import unittest
from collections.abc import Callable
from typing import Any


def expectedFailureIf(condition: bool) -> Callable[[Any], Any]:
    """Return a decorator of tests that fail if `condition` holds."""
    return unittest.expectedFailure if condition else lambda test: test
