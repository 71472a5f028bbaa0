"""Number formats of quantized values, and the grids that a range of real values gives.

Owns the arithmetic of scales and zero points, which is that of torch.ao's observers: float32, with
a scale of at least `EPSILON`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

__all__ = ["EPSILON", "Format", "Grid", "affine", "format_named", "symmetric"]

#: Smallest scale, that of torch.ao's observers: the distance from 1 to the next float32.
EPSILON = 2.0**-23

#: Name -> number of bits, and the largest finite value.
_FLOATS = {"fp8_e4m3": ("float8_e4m3fn", 448.0), "fp8_e5m2": ("float8_e5m2", 57344.0)}


@dataclass(frozen=True)
class Format:
    """A number format.

    Attributes:
        name: Such as ``int8`` or ``fp8_e4m3``.
        bits: Width of a number.
        highest: The largest number of a grid that is symmetric around 0, such as 127.
        float8: The frameworks' name of the 8-bit floating point type; empty for integers.
    """

    name: str
    bits: int
    highest: float
    float8: str = ""


def format_named(name: str) -> Format | None:
    """Return the format of a name: ``int2`` to ``int8``, ``fp8_e4m3`` or ``fp8_e5m2``.

    Returns:
        The format; None for the name ``none``.

    Raises:
        ValueError: The format does not exist.

    >>> format_named("int4").highest
    7.0
    """
    if name == "none":
        return None
    if name in _FLOATS:
        return Format(name, 8, _FLOATS[name][1], _FLOATS[name][0])
    if not re.fullmatch("int[2-8]", name):
        raise ValueError(
            f"{name!r} is not a format: there are int2 to int8, {', '.join(_FLOATS)} and none"
        )
    bits = int(name[3:])
    return Format(name, bits, float(2 ** (bits - 1) - 1))


@dataclass(frozen=True)
class Grid:
    """The values that quantized numbers can have: ``(n - zero) * scale``.

    Attributes:
        scale: The distance of neighbours, a float32 array that broadcasts to the values, or to
            their blocks.
        zero: The number of the value 0, an array of the same shape.
        lowest: The smallest number.
        highest: The largest number.
        float8: The type of the numbers if they are not integers.
        blocks: The shape in which the values have an axis of groups, and one in each group; empty
            if there are no groups.
    """

    scale: Any
    zero: Any
    lowest: float
    highest: float
    float8: str = ""
    blocks: tuple[int, ...] = ()


def symmetric(form: Format, largest: Any) -> Grid:
    """Return the grid around 0 that reaches to the largest magnitudes, an array."""
    import numpy

    largest = numpy.asarray(largest, numpy.float32)
    scale = numpy.maximum(largest / numpy.float32(form.highest), numpy.float32(EPSILON))
    return Grid(scale, numpy.zeros_like(scale), -form.highest, form.highest, form.float8)


def affine(form: Format, low: Any, high: Any) -> Grid:
    """Return the unsigned grid over a range, which is extended to contain 0; of floats the
    symmetric one. The ends are numbers or arrays.
    """
    import numpy

    if form.float8:
        return symmetric(form, numpy.maximum(abs(low), abs(high)))
    least = numpy.minimum(low, 0.0).astype(numpy.float32)
    most = numpy.maximum(high, 0.0).astype(numpy.float32)
    last = 2.0**form.bits - 1
    scale = numpy.maximum((most - least) / numpy.float32(last), numpy.float32(EPSILON))
    zero = numpy.clip(-numpy.round(least / scale), 0, last)
    return Grid(numpy.asarray(scale), numpy.asarray(zero, numpy.float32), 0.0, last)
