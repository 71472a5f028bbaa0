"""Whether values are finite, of any framework's tensors.

Owns the kinds of what is not finite, as bits, and how they are found: at once where the values are
on the host, or as numbers that stay on the device until somebody asks. Frameworks are imported by
whoever has a tensor of theirs.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["INF", "NAN", "Pending", "bits_of", "candidates", "is_on_host", "pending", "resolve"]

#: Bits of what is in a tensor. Where there is a NaN, infinities beside it may go unnoticed.
NEGATIVE, POSITIVE, NAN = 1, 2, 4
INF = NEGATIVE | POSITIVE

#: Smallest and largest value of a tensor, still on its device.
Pending = tuple[Any, Any]


def candidates(values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Tensors and numbers of floating point at positions; ``2.0`` is the first of a list at 2."""
    for position, value in enumerate(values):
        if isinstance(value, (list, tuple)):
            for inner, part in candidates(value):
                yield f"{position}.{inner}", part
        elif isinstance(value, float) or _is_floating(value):
            yield str(position), value


def is_on_host(value: Any) -> bool:
    """Return True if asking for its numbers waits for no device."""
    device = getattr(value, "device", None)
    return getattr(device, "type", "cpu") == "cpu"


def bits_of(value: Any, separate: bool = False) -> int:
    """The bits of a tensor or number.

    Args:
        value: What `candidates` gave.
        separate: Look for infinities beside NaN, too, which costs more.

    Raises:
        Exception: The values cannot be looked at; frameworks raise what they like.
    """
    if isinstance(value, float):
        return _bits(value, value)
    if hasattr(value, "detach"):
        values = _of_torch(value)
        # Sums are the fastest that NaN and infinity never vanish in; a finite one may overflow.
        if cmath.isfinite(values.sum(dtype=_wide(values)).item()):
            return 0
        low, high = _extremes(values)
        return _bits(low.item(), high.item()) | (separate and _infinities(values))
    return _of_array(value, separate)


def pending(value: Any) -> Pending:
    """Return what `resolve` makes bits of: two numbers on the tensor's device, without waiting.

    Raises:
        Exception: The same.
    """
    if isinstance(value, float):
        return value, value
    if value.device.type == "meta":
        raise NotImplementedError("a tensor without values")
    return _extremes(_of_torch(value))


def resolve(numbers: Sequence[Pending]) -> list[int]:
    """The bits of what is pending, in one transfer from each device."""
    import torch

    # One stack a device: programs may use several.
    places: dict[Any, list[tuple[int, Any]]] = {}
    found: list[list[float]] = [[0.0, 0.0] for _ in numbers]
    for index, pair in enumerate(numbers):
        for side, number in enumerate(pair):
            if isinstance(number, float):
                found[index][side] = number
            else:
                places.setdefault(number.device, []).append((2 * index + side, number))
    for listed in places.values():
        stacked = torch.stack([number.float() for _, number in listed]).tolist()
        for (place, number), value in zip(listed, stacked, strict=True):
            # A double beyond float32 is finite, and so was everything if it is not.
            wide = math.isinf(value) and number.dtype == torch.float64
            found[place // 2][place % 2] = number.item() if wide else value
    return [_bits(*pair) for pair in found]


def _bits(low: float, high: float) -> int:
    if math.isnan(low) or math.isnan(high):
        return NAN
    return NEGATIVE * (low == -math.inf) | POSITIVE * (high == math.inf)


def _is_floating(value: Any) -> bool:
    if hasattr(value, "detach"):
        return bool(value.is_floating_point() or value.is_complex())
    dtype = getattr(value, "dtype", None)
    return bool(getattr(dtype, "is_floating", False) or getattr(dtype, "is_complex", False))


def _of_torch(value: Any) -> Any:
    import torch

    if value.layout is not torch.strided:
        value = value._values() if value.layout is torch.sparse_coo else value.values()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return value.float() if value.itemsize == 1 else value


def _wide(values: Any) -> Any:
    import torch

    return torch.float32 if values.itemsize == 2 else None


def _extremes(values: Any) -> Pending:
    import torch

    return torch.aminmax(values) if values.numel() else (0.0, 0.0)


def _infinities(values: Any) -> int:
    return NEGATIVE * bool(values.isneginf().any()) | POSITIVE * bool(values.isposinf().any())


def _of_array(value: Any, separate: bool) -> int:
    import numpy

    array = numpy.asarray(value)
    wide = numpy.float32 if array.itemsize <= 2 else None
    with numpy.errstate(all="ignore"):
        if cmath.isfinite(array.sum(dtype=wide)):
            return 0
    if array.dtype.kind == "c":
        array = numpy.stack([array.real, array.imag])
    bits = NAN if numpy.isnan(array).any() else 0
    if separate or not bits:
        bits |= NEGATIVE * bool((array == -math.inf).any())
        bits |= POSITIVE * bool((array == math.inf).any())
    return bits
