"""Fault models: what becomes of an element, in its true bits.

Owns the bits of every dtype. Arrays are those of `host`: of dtypes that NumPy lacks they hold the
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from amanda_tools.kit.tensors.values import NotReadableError, numbers

__all__ = ["Bits", "Model", "apply_model", "bits_of", "fields_of"]

#: What happens to an element.
Model = Literal["bit_flip", "stuck_at_0", "stuck_at_1", "zero", "random", "noise", "scale", "value"]
#: Names of groups of bits.
Bits = Literal["any", "sign", "exponent", "mantissa"]
#: Dtype -> number of mantissa bits and of exponent bits; above them is the sign.
_FLOATS = {
    "float64": (52, 11),
    "float32": (23, 8),
    "float16": (10, 5),
    "bfloat16": (7, 8),
    "float8_e4m3fn": (3, 4),
    "float8_e4m3fnuz": (3, 4),
    "float8_e5m2": (2, 5),
    "float8_e5m2fnuz": (2, 5),
}


def bits_of(array: Any) -> Any:
    """Return a view of an array as unsigned integers of the same size.

    Raises:
        NotReadableError: Its elements are not numbers of 1, 2, 4 or 8 bytes.
    """
    if array.dtype.kind not in "biuf":
        raise NotReadableError(f"no fault model for dtype {array.dtype}")
    return array.view(f"u{array.dtype.itemsize}")


def fields_of(dtype: str, itemsize: int, chosen: Bits | Sequence[int]) -> list[int]:
    """Return the numbers of the chosen bits, of which 0 is the least significant.

    >>> fields_of("float16", 2, "exponent")
    [10, 11, 12, 13, 14]

    Raises:
        ValueError: The dtype does not have these bits.
    """
    width = 1 if dtype == "bool" else 8 * itemsize
    if not isinstance(chosen, str):
        if any(not 0 <= bit < width for bit in chosen):
            raise ValueError(f"bits must be from 0 to {width - 1} for {dtype}, not {chosen}")
        return list(chosen)
    if chosen == "any":
        return list(range(width))
    if chosen == "sign" and dtype.startswith(("float", "bfloat", "int")):
        return [width - 1]
    if dtype not in _FLOATS:
        raise ValueError(f"{dtype} has no {chosen} bits")
    mantissa, exponent = _FLOATS[dtype]
    return list(range(mantissa) if chosen == "mantissa" else range(mantissa, mantissa + exponent))


def apply_model(
    model: Model,
    array: Any,
    dtype: str,
    places: Any,
    bits: Any,
    amount: float,
    random: Any,
    own: Any = slice(None),
) -> None:
    """Change elements of a flat array in place.

    Args:
        model: The fault model.
        array: The array, as `host` returns it.
        dtype: Name of the tensor's dtype.
        places: Indices of the elements.
        bits: The number of a bit for each of them.
        amount: Standard deviation of `noise`, factor of `scale`, limit of `random`, or the value.
        random: A NumPy generator.
        own: Which of the places are in the array, if others hold the rest of the value.
    """
    import numpy as np

    drawn: Any = np.zeros(len(places))
    if model == "random":
        drawn = random.uniform(-amount, amount, len(places))
    elif model == "noise":
        drawn = random.normal(0.0, amount, len(places))
    places, bits, drawn = places[own], bits[own], drawn[own]
    raw = bits_of(array)
    one = np.left_shift(raw.dtype.type(1), bits.astype(raw.dtype))
    if model == "bit_flip":
        raw[places] ^= one
    elif model == "stuck_at_0":
        raw[places] &= ~one
    elif model == "stuck_at_1":
        raw[places] |= one
    elif model == "zero":
        raw[places] = 0  # In every dtype these are the bits of zero.
    else:
        old = numbers(array[places], dtype).astype(np.float64)
        if model == "random":
            new = drawn
        elif model == "noise":
            new = old + drawn
        else:
            new = old * amount if model == "scale" else np.full(len(places), amount)
        raw[places] = _encoded(new, array, dtype)


def _encoded(values: Any, array: Any, dtype: str) -> Any:
    """Return the bits of numbers in a dtype: the nearest value, and of two the even one."""
    import numpy as np

    if dtype == "bfloat16":
        wide = values.astype(np.float32).view(np.uint32)
        rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
        return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
    if dtype.startswith("float8"):
        table = numbers(np.arange(256, dtype=np.uint8), dtype).astype(np.float64)
        distances = np.abs(table[None] - values[:, None])
        distances[:, ~np.isfinite(table)] = np.inf
        return distances.argmin(axis=1).astype(np.uint8)
    with np.errstate(over="ignore"):
        if array.dtype.kind in "iu":
            limits = np.iinfo(array.dtype)
            values = np.clip(np.rint(values), limits.min, limits.max)
        return bits_of(values.astype(array.dtype))
