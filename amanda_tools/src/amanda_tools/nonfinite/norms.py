"""Norms of gradients over steps, for the weights that operators read.

A weight that several operators read has an entry for each: its gradient is the sum of theirs, and
their norms do not add up to the norm of the sum.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any

from amanda_core import OpContext
from amanda_core.interface.facts import Facts, NotReadableError
from amanda_tools.kit.operators.entries import OpFacts
from amanda_tools.kit.operators.weights import WeightKeys
from amanda_tools.kit.tensors.statistics import statistics_of
from amanda_tools.kit.tensors.values import facts_of, host, tensors_in

__all__ = ["GradientNorms", "Norms"]


@dataclass
class Norms(OpFacts):
    """Norms of the gradient of one weight that an operator reads.

    Attributes:
        weight: The parameter, or the part of it.
        norms: Euclidean norm in each step, of all gradients that arrived in it; None in a step
            without a gradient, or with one that is not finite.
    """

    weight: str = ""
    norms: list[float | None] = field(default_factory=list)


class GradientNorms:
    """Norms by weight and step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The current step; None in one that is left out.
        self._step: int | None = 0
        self._steps: list[int] = []
        #: Operator and position -> description and, for each step, sum of squares.
        self._found: dict[tuple[int, int], tuple[Norms, dict[int, float]]] = {}

    def begin(self, step: int | None) -> None:
        """Record the number of the step; None leaves it out."""
        self._step = step

    def watch(self, context: OpContext) -> None:
        """Insert routines that measure the gradients of the weights of a forward operator."""
        keys, reads = WeightKeys(context), context.weights
        if not keys:
            return
        for place in reads:
            position = place if isinstance(place, int) else place[0]
            key = keys.at(position)
            if key is None:
                continue  # In a list of weights, whose gradients arrive together.
            entry = (context.get_op_id(), position)
            self._found.setdefault(entry, (Norms.of(context, weight=key), {}))
            context.insert_after_backward_op(
                self.measure,
                observe=True,
                grad_inputs=[position],
                entry=entry,
                facts=facts_of(context),
            )

    def measure(self, gradient: Any, entry: tuple[int, int], facts: Facts) -> None:
        """Add the norm of one gradient to its step."""
        if (step := self._step) is None:
            return
        squares = 0.0
        for _, tensor in tensors_in(facts, [gradient]):
            try:
                found = statistics_of(host(facts, tensor))
            except NotReadableError:
                return
            finite = not (found.nan or found.inf) and found.norm is not None
            squares += found.norm**2 if finite and found.norm is not None else math.nan
        with self._lock:
            if not self._steps or self._steps[-1] != step:
                self._steps.append(step)
            _, by_step = self._found[entry]
            by_step[step] = by_step.get(step, 0.0) + squares

    def result(self) -> tuple[list[int], list[Norms]]:
        """Return the steps, and the norms of each weight in them."""
        with self._lock:
            steps = list(self._steps)
            found = []
            for norms, by_step in self._found.values():
                values = [_root(by_step.get(step)) for step in steps]
                if by_step:
                    found.append(Norms(**{**vars(norms), "norms": values}))
            return steps, found


def _root(squares: float | None) -> float | None:
    return None if squares is None or not math.isfinite(squares) else math.sqrt(squares)
