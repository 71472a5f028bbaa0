"""Check whether values are finite.

Represents the kinds of non-finite values as bits. Values are read in main memory or, with PyTorch,
reduced by PyTorch's operators to numbers that stay on the device until they are needed.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterator, Sequence
from typing import Any

from amanda_core import OpContext
from amanda_core.interface.facts import Facts
from amanda_tools.kit.tensors.types import is_floating
from amanda_tools.kit.tensors.values import facts_of, host, numbers as decoded

__all__ = ["INF", "NAN", "Pending", "Probe", "probe_of", "resolve"]

#: Bits for the contents of a tensor. If it has a NaN, its infinities may be missed.
NEGATIVE, POSITIVE, NAN = 1, 2, 4
INF = NEGATIVE | POSITIVE

#: Dtypes of which a sum is not finite if an element is not.
_SUMMED = frozenset({"float32", "float64"})

#: Minimum and maximum of a tensor, still on its device.
Pending = tuple[Any, Any]


class Probe:
    """Checks tensors of a framework; this base class copies them to main memory.

    Args:
        facts: The driver's facts about tensors.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def candidates(self, values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        """Yield floating-point tensors and numbers with their position; ``2.0`` is the first in a
        list at 2.
        """
        for position, value in enumerate(values):
            if isinstance(value, (list, tuple)):
                for inner, part in self.candidates(value):
                    yield f"{position}.{inner}", part
            elif isinstance(value, float) or is_floating(self.facts, value):
                yield str(position), value

    def floating(self, values: Sequence[Any]) -> Iterator[Any]:
        """Yield the same without positions."""
        for value in values:
            if isinstance(value, (list, tuple)):
                yield from self.floating(value)
            elif isinstance(value, float) or is_floating(self.facts, value):
                yield value

    def bits_of(self, value: Any, separate: bool = False) -> int:
        """Return the bits of a tensor or number.

        Args:
            value: A value from `candidates`.
            separate: Also look for infinities in a tensor with NaNs, which costs more.

        Raises:
            Exception: The values cannot be read; the type depends on the framework.
        """
        return _bits(value, value) if isinstance(value, float) else self._look(value, separate)

    def are_finite(self, values: Sequence[Any]) -> bool:
        """Return True if a quick look shows that all values are finite and in main memory."""
        import numpy

        for value in values:
            if value is None:
                continue
            if not self.facts.is_tensor(value) or self.facts.dtype(value) not in _SUMMED:
                return False
            try:
                array = numpy.asarray(self.facts.view(value)).ravel()
            except Exception:  # The closer look handles it.
                return False
            with numpy.errstate(all="ignore"):
                # As fast as a sum, or three times as fast.
                if not math.isfinite(array.dot(array)):
                    return False
        return True

    def are_pending(self, values: Sequence[Any], always: bool) -> bool:
        """Return True if the check should stay on the values' device; `always` includes the CPU."""
        return False

    def pending(self, value: Any) -> Pending:
        """Return two numbers, still on the tensor's device, that `resolve` converts to bits.

        Raises:
            Exception: The values cannot be read; the type depends on the framework.
        """
        if isinstance(value, float):
            return value, value
        raise NotImplementedError("this framework's values are read on the host")

    def _look(self, value: Any, separate: bool) -> int:
        held = host(self.facts, value)
        return _of_array(decoded(held.array, held.dtype), separate)


class _TorchProbe(Probe):
    """Checks PyTorch's tensors on their device."""

    def __init__(self, facts: Facts) -> None:
        import torch

        super().__init__(facts)
        self._tensor, self._summed = torch.Tensor, (torch.float32, torch.float64)

    def floating(self, values: Sequence[Any]) -> Iterator[Any]:
        for value in values:
            if isinstance(value, self._tensor):
                if value.is_floating_point() or value.is_complex():
                    yield value
            elif isinstance(value, float):
                yield value
            elif isinstance(value, (list, tuple)):
                yield from self.floating(value)

    def are_finite(self, values: Sequence[Any]) -> bool:
        for value in values:
            if type(value) is self._tensor and value.is_cpu and value.dtype in self._summed:
                if self._is_without_data(value):
                    return False
                try:
                    if not math.isfinite(value.sum().item()):
                        return False
                except Exception:  # Of a layout without sums, which the closer look handles.
                    return False
            elif value is not None:
                return False
        return True

    def are_pending(self, values: Sequence[Any], always: bool) -> bool:
        for value in values:
            if isinstance(value, (list, tuple)):
                value = value[0] if value else None
            if isinstance(value, self._tensor) and (always or not value.is_cpu):
                return True
        return False

    def pending(self, value: Any) -> Pending:
        if isinstance(value, float):
            return value, value
        return _extremes(self._real(value))

    def _is_without_data(self, value: Any) -> bool:
        return value.device.type == "meta" or self.facts.layout(value) == "without data"

    def _real(self, value: Any) -> Any:
        if self._is_without_data(value):
            raise NotImplementedError("a tensor without values")
        return _real(self.facts.local(value))

    def _look(self, value: Any, separate: bool) -> int:
        values = self._real(value)
        # A sum is the fastest reduction that keeps NaN and infinity; finite values may overflow.
        if cmath.isfinite(values.sum(dtype=_wide(values)).item()):
            return 0
        low, high = _extremes(values)
        return _bits(low.item(), high.item()) | (separate and _infinities(values))


def probe_of(context: OpContext) -> Probe:
    """Return the probe for the tensors of an operator."""
    kind = _TorchProbe if context.namespace.startswith("pytorch/") else Probe
    return kind(facts_of(context))


def resolve(numbers: Sequence[Pending]) -> list[int]:
    """Return the bits of pending values, with one transfer from each device."""
    import torch

    # One stack for each device, because programs may use several.
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
            # A finite double may become infinite in float32, so read it as it is.
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
