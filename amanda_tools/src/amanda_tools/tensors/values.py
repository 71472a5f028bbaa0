"""Values of tensors in main memory, as NumPy arrays.

Owns how a tool gets them from a driver, and numbers from them. NumPy has no bfloat16 and no 8-bit
floating point; arrays of these hold the bits as unsigned integers, and `numbers` decodes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from amanda_core import OpContext
from amanda_core.facts import Facts, NotReadableError

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

#: dtype -> bits of exponent and mantissa, bias, and whether it has infinities.
_SMALL = {
    "bfloat16": (8, 7, 127, True),
    "float8_e4m3fn": (4, 3, 7, False),
    "float8_e4m3fnuz": (4, 3, 8, False),
    "float8_e5m2": (5, 2, 15, True),
    "float8_e5m2fnuz": (5, 2, 16, False),
}


class _Unknown(Facts):
    """The answers where the driver gives none: nothing is a tensor."""

    def is_tensor(self, value: Any) -> bool:
        return False


UNKNOWN: Facts = _Unknown()


def facts_of(context: OpContext) -> Facts:
    """Return what the driver answers about tensors; `UNKNOWN` where it answers nothing."""
    return context.facts or UNKNOWN


@dataclass(frozen=True)
class HostTensor:
    """The values of a tensor.

    Attributes:
        array: A copy of them, in C order; the bits as unsigned integers where NumPy lacks the
            dtype.
        dtype: Name of the tensor's dtype, such as ``bfloat16``.
    """

    array: Any
    dtype: str


def need_numpy() -> None:
    """Make sure that there is NumPy before a program runs, rather than in the middle of it.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import numpy  # noqa: F401  Whether it is there.
    except ImportError as error:
        raise ImportError("This needs NumPy: pip install 'amanda-tools[numpy]'") from error


def tensors_in(facts: Facts, values: Sequence[Any] | None) -> Iterator[tuple[str, Any]]:
    """Yield the tensors at positions, each with its position; ``2.0`` is the first of a list at 2.

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
    """Return a copy of a tensor's values.

    Raises:
        NotReadableError: It has no values in one array: sparse, quantized, of strings, symbolic.
    """
    import numpy

    name = facts.dtype(tensor)
    array = numpy.asarray(facts.values(tensor), order="C")
    if array.dtype.kind == "c":
        name = array.dtype.name  # Complex numbers of 16-bit parts come as wider ones.
    elif name not in _SMALL and array.dtype.name != name:
        raise NotReadableError(f"dtype {name}")
    return HostTensor(array, name)


def numbers(array: Any, dtype: str) -> Any:
    """The numbers of an array of `HostTensor`: as they are, or decoded as float32."""
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
