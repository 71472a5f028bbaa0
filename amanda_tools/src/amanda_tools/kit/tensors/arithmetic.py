"""Arithmetic with tensors where they are, by the driver's `Arithmetic`.

Owns where tools find it, and why a tool cannot change values without it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from amanda_core.interface.facts import Arithmetic, Facts, NotReadableError

__all__ = ["arithmetic_of", "numpy_arithmetic", "tensor_like", "widened"]

_NONE = "its driver provides no arithmetic, and its tensors are not NumPy's arrays"


class _NumPy(Arithmetic):
    counts = True

    def astype(self, x: Any, dtype: str) -> Any:
        return x != 0 if dtype == "bool" else super().astype(x, dtype)  # Several times faster.


@cache
def numpy_arithmetic() -> Arithmetic:
    """Return the arithmetic of NumPy's arrays.

    >>> import numpy
    >>> numpy_arithmetic().round(numpy.asarray([0.5, 1.5])).tolist()
    [0.0, 2.0]
    """
    import numpy

    return _NumPy(numpy)


def arithmetic_of(facts: Facts, value: Any) -> Arithmetic:
    """Return the arithmetic of a value: its driver's, or that of NumPy for an array.

    Raises:
        NotReadableError: There is none.

    In a routine::

        return arithmetic_of(facts, value).clip(value, -1.0, 1.0)
    """
    if facts.arithmetic is not None:
        return facts.arithmetic
    import numpy

    if isinstance(value, numpy.ndarray):
        return numpy_arithmetic()
    raise NotReadableError(_NONE)


def widened(facts: Facts, value: Any) -> Any:
    """Return a tensor of floating-point numbers with at least 32 bits an element."""
    if facts.dtype(value) in ("float32", "float64"):
        return value
    return arithmetic_of(facts, value).astype(value, "float32")


def tensor_like(facts: Facts, array: Any, value: Any) -> Any:
    """Return a NumPy array as a tensor with the dtype and the device of another one."""
    return arithmetic_of(facts, value).astype(facts.tensor(array, value), facts.dtype(value))
