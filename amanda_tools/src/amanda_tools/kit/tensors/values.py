"""Values of tensors in main memory, as NumPy arrays.

NumPy has neither bfloat16 nor 8-bit floating point. Arrays of these types hold the bits as unsigned
integers, and `numbers` decodes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from amanda_core import OpContext
from amanda_core.interface.facts import Facts, NotReadableError

__all__ = [
    "UNKNOWN",
    "HostTensor",
    "NotReadableError",
    "facts_of",
    "host",
    "need_numpy",
    "numbers",
    "tensors_in",
]

#: Dtype -> number of exponent bits, of mantissa bits, bias, and whether it has infinities.
_SMALL = {
    "bfloat16": (8, 7, 127, True),
    "float8_e4m3fn": (4, 3, 7, False),
    "float8_e4m3fnuz": (4, 3, 8, False),
    "float8_e5m2": (5, 2, 15, True),
    "float8_e5m2fnuz": (5, 2, 16, False),
}


class _Unknown(Facts):
    """Stands in for a driver that does not describe values: nothing is a tensor."""

    def is_tensor(self, value: Any) -> bool:
        return False


UNKNOWN: Facts = _Unknown()


def facts_of(context: OpContext) -> Facts:
    """Return the driver's `Facts` about tensors, or `UNKNOWN` if it provides none.

    In an analysis routine::

        shape = facts_of(context).shape(context.get_inputs()[0])
    """
    return context.facts or UNKNOWN


@dataclass(frozen=True)
class HostTensor:
    """Values of a tensor in main memory.

    Attributes:
        array: A copy of the values in C order. If NumPy lacks the dtype, it holds the bits as
            unsigned integers.
        dtype: Name of the tensor's dtype, such as ``bfloat16``.

    >>> import numpy
    >>> HostTensor(numpy.zeros(2, "uint16"), "bfloat16").array.shape
    (2,)
    """

    array: Any
    dtype: str


def need_numpy() -> None:
    """Check that NumPy is installed, so that a missing package is reported before the program runs.

    Raises:
        ImportError: NumPy is not installed.

    >>> need_numpy()
    """
    try:
        import numpy  # noqa: F401  Only checks that it is installed.
    except ImportError as error:
        raise ImportError("This needs NumPy, which is missing: pip install numpy") from error


def tensors_in(facts: Facts, values: Sequence[Any] | None) -> Iterator[tuple[str, Any]]:
    """Yield each tensor with its position; ``2.0`` is the first element of a list at position 2.

    >>> list(tensors_in(UNKNOWN, [1.5, None]))
    []
    """
    for position, value in enumerate(values or ()):
        if facts.is_tensor(value):
            yield str(position), value
        elif isinstance(value, (list, tuple)):
            for inner, tensor in tensors_in(facts, value):
                yield f"{position}.{inner}", tensor


def host(facts: Facts, tensor: Any) -> HostTensor:
    """Return a copy of a tensor's values in main memory.

    Raises:
        NotReadableError: The tensor has no plain array of values: it is sparse, quantized, symbolic
            or of strings.

    In an instrumentation routine::

        tensor = host(facts, output)
        largest = numbers(tensor.array, tensor.dtype).max()
    """
    import numpy

    name = facts.dtype(tensor)
    array = numpy.asarray(facts.values(tensor), order="C")
    held = _name(array.dtype)
    if array.dtype.kind == "c":
        name = held  # NumPy has no complex type with 16-bit parts.
    elif name not in _SMALL and held != name:
        raise NotReadableError(f"dtype {name}")
    return HostTensor(array, name)


@lru_cache(maxsize=64)
def _name(dtype: Any) -> str:
    found: str = dtype.name  # NumPy computes it in Python.
    return found


def numbers(array: Any, dtype: str) -> Any:
    """Return the numbers in an array of `HostTensor`, decoded as float32 where NumPy lacks the
    dtype.

    >>> import numpy
    >>> numbers(numpy.asarray([0x3F80, 0xC000], "uint16"), "bfloat16").tolist()
    [1.0, -2.0]
    """
    import numpy

    if dtype not in _SMALL:
        return array
    if dtype == "bfloat16":
        return (array.astype(numpy.uint32) << 16).view(numpy.float32)
    codes = [_decoded(code, dtype) for code in range(256)]
    return numpy.asarray(codes, numpy.float32)[array]


def _decoded(code: int, dtype: str) -> float:
    exponents, mantissas, bias, infinities = _SMALL[dtype]
    sign = -1.0 if code >> (exponents + mantissas) else 1.0
    exponent = code >> mantissas & (1 << exponents) - 1
    mantissa = code & (1 << mantissas) - 1
    last = (1 << exponents) - 1
    if dtype.endswith("uz"):
        if code == 0x80:
            return float("nan")
    elif infinities and exponent == last:
        return float("nan") if mantissa else sign * float("inf")
    elif exponent == last and mantissa == (1 << mantissas) - 1:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissas)
    return sign * (1 + mantissa / (1 << mantissas)) * 2.0 ** (exponent - bias)
