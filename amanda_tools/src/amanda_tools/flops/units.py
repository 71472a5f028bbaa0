"""Costs of forward passes and of steps, beside those of operators.

Owns what a pass and a sample are, and which of many costs stands for all of them: the median. At
most `_DISTINCT` different costs are kept for each module; others only count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from amanda_core.engine.calls import Call
from amanda_tools.kit.output.rendering import format_quantity
from amanda_tools.kit.tensors.values import tensors_in

__all__ = ["UnitCost", "Units"]

_DISTINCT = 256


class _Cost(NamedTuple):
    macs: int = 0
    flops: int = 0
    backward_macs: int = 0
    backward_flops: int = 0


@dataclass
class UnitCost:
    """Cost of one forward pass or of one step: the median of those that ran.

    Attributes:
        module: The outermost module whose call is a pass; empty for a step.
        times: How many ran.
        distinct: How many different costs they had.
        samples: Samples in the batch, the first axis of the pass's first tensor; None if not known.
        macs: Multiply-accumulates, forward.
        flops: Floating-point operations, forward.
        backward_macs: Multiply-accumulates of the gradients.
        backward_flops: Floating-point operations of the gradients.
    """

    module: str
    times: int
    distinct: int
    samples: int | None
    macs: int
    flops: int
    backward_macs: int = 0
    backward_flops: int = 0

    @property
    def of_how_many(self) -> str:
        """Say which of several costs it is; empty if there is one."""
        if self.times == 1:
            return ""
        return f" ({'each' if self.distinct == 1 else 'median'} of {self.times})"

    def describe(self) -> str:
        """Return a phrase with the multiply-accumulates of the pass or step."""
        macs = format_quantity(self.macs, "MACs")
        if not self.module:
            backward = self.backward_macs
            more = f" and {format_quantity(backward, 'MACs')} backward" if backward else ""
            return f"a step{self.of_how_many}: {macs} forward{more}"
        phrase = f"a forward pass of {self.module}{self.of_how_many}: {macs}"
        if self.samples == 1:
            return f"{phrase} for one sample"
        if self.samples:
            one = format_quantity(round(self.macs / self.samples), "MACs")
            return f"{phrase} for a batch of {self.samples}, {one} for one sample"
        return phrase


class Units:
    """Divides a running total into passes and steps.

    Args:
        batch: How many samples a batch has, if the program's user says so.
    """

    def __init__(self, batch: int | None) -> None:
        self._batch = batch
        self._total = [0, 0, 0, 0]
        self._at_call = self._at_step = _Cost()
        #: Module -> cost and samples -> number of passes.
        self._passes: dict[str, Counter[tuple[_Cost, int | None]]] = {}
        self._steps: Counter[tuple[_Cost, int | None]] = Counter()

    def add(self, macs: int, flops: int, backward: bool) -> None:
        """Add the cost of an execution."""
        self._total[2 * backward] += macs
        self._total[2 * backward + 1] += flops

    def begin_call(self) -> None:
        """Begin a pass."""
        self._at_call = _Cost(*self._total)

    def end_call(self, call: Call) -> None:
        """End a pass; one that costs nothing, such as that of a loss, is none."""
        cost = self._since(self._at_call)
        if any(cost):
            # A backward pass inside a call, such as that of a penalty, is not part of it.
            cost = _Cost(cost.macs, cost.flops)
            found = self._passes.setdefault(call.module, Counter())
            _count(found, cost, lambda: self._batch or _samples_in(call))

    def end_step(self) -> None:
        """End a step."""
        cost, self._at_step = self._since(self._at_step), _Cost(*self._total)
        if any(cost):
            _count(self._steps, cost, lambda: self._batch)

    def passes(self) -> list[UnitCost]:
        """Return the cost of a pass of each outermost module, the largest first."""
        found = [_median(module, costs) for module, costs in self._passes.items()]
        return sorted(found, key=lambda cost: -cost.flops)

    def step(self) -> UnitCost | None:
        """Return the cost of a step; None if no step ended."""
        return _median("", self._steps) if self._steps else None

    def _since(self, before: _Cost) -> _Cost:
        return _Cost(*(now - then for now, then in zip(self._total, before, strict=True)))


def _count(
    found: Counter[tuple[_Cost, int | None]], cost: _Cost, samples: Callable[[], int | None]
) -> None:
    key = cost, samples()
    if key not in found and len(found) >= _DISTINCT:
        # The nearest one stands for it, so that the median stays near.
        key = min(found, key=lambda other: abs(sum(other[0]) - sum(cost)))
    found[key] += 1


def _median(module: str, costs: Counter[tuple[_Cost, int | None]]) -> UnitCost:
    times = costs.total()
    left = (times - 1) // 2
    for (cost, samples), number in sorted(costs.items(), key=lambda item: sum(item[0][0])):
        if left < number:
            return UnitCost(module, times, len(costs), samples, *cost)
        left -= number
    raise AssertionError


def _samples_in(call: Call) -> int | None:
    """Return the first axis of the first tensor with axes among the arguments of a call."""
    if call.facts is None:
        return None
    given = [*call.args, *call.kwargs.values()]
    for _, tensor in tensors_in(call.facts, given):
        shape = call.facts.shape(tensor)
        if shape:
            return shape[0]
    return None
