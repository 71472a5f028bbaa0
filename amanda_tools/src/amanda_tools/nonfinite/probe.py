"""Whether values are finite.

Owns the kinds of what is not finite, as bits, and how they are found: from values in main memory,
or, with PyTorch, by its own operators, as numbers that stay on the device until somebody asks.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterator, Sequence
from typing import Any

from amanda_core import OpContext
from amanda_core.facts import Facts
from amanda_tools.tensors.types import is_floating
from amanda_tools.tensors.values import facts_of, host
from amanda_tools.tensors.values import numbers as decoded

__all__ = ["INF", "NAN", "Pending", "Probe", "probe_of", "resolve"]

#: Bits of what is in a tensor. Where there is a NaN, infinities beside it may go unnoticed.
NEGATIVE, POSITIVE, NAN = 1, 2, 4
INF = NEGATIVE | POSITIVE

#: Smallest and largest value of a tensor, still on its device.
Pending = tuple[Any, Any]


class Probe:
    """How tensors of a framework are looked at: here from a copy in main memory.

    Args:
        facts: What the driver tells of tensors.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def candidates(self, values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        """Yield floating-point tensors and numbers; ``2.0`` is the first of a list at 2."""
        for position, value in enumerate(values):
            if isinstance(value, (list, tuple)):
                for inner, part in self.candidates(value):
                    yield f"{position}.{inner}", part
            elif isinstance(value, float) or is_floating(self.facts, value):
                yield str(position), value

    def bits_of(self, value: Any, separate: bool = False) -> int:
        """Return the bits of a tensor or number.

        Args:
            value: What `candidates` gave.
            separate: Look for infinities beside NaN, too, which costs more.

        Raises:
            Exception: The values cannot be looked at; frameworks raise what they like.
        """
        return _bits(value, value) if isinstance(value, float) else self._look(value, separate)

    def is_pending(self, value: Any, always: bool) -> bool:
        """Return True for a tensor that is on a device, or for any if `always`.

        Only of such a one `pending` gives numbers that stay where it is.
        """
        return False

    def pending(self, value: Any) -> Pending:
        """Return what `resolve` makes bits of: two numbers on the tensor's device, unawaited.

        Raises:
            Exception: The same.
        """
        if isinstance(value, float):
            return value, value
        raise NotImplementedError("values are looked at where they are read")

    def _look(self, value: Any, separate: bool) -> int:
        held = host(self.facts, value)
        return _of_array(decoded(held.array, held.dtype), separate)


class _TorchProbe(Probe):
    """PyTorch's tensors, on their device."""

    def is_pending(self, value: Any, always: bool) -> bool:
        return self.facts.is_tensor(value) and (always or value.device.type != "cpu")

    def pending(self, value: Any) -> Pending:
        if isinstance(value, float):
            return value, value
        if value.device.type == "meta":
            raise NotImplementedError("a tensor without values")
        return _extremes(_real(value))

    def _look(self, value: Any, separate: bool) -> int:
        values = _real(value)
        # Sums are the fastest that NaN and infinity never vanish in; a finite one may overflow.
        if cmath.isfinite(values.sum(dtype=_wide(values)).item()):
            return 0
        low, high = _extremes(values)
        return _bits(low.item(), high.item()) | (separate and _infinities(values))


def probe_of(context: OpContext) -> Probe:
    """Return how the tensors of an operator are looked at."""
    kind = _TorchProbe if context.namespace.startswith("pytorch/") else Probe
    return kind(facts_of(context))


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


def _real(value: Any) -> Any:
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


def _of_array(array: Any, separate: bool) -> int:
    import numpy

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
