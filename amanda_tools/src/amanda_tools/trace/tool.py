"""`Trace`: record which operators a program runs, in which order, with their places and shapes."""

from __future__ import annotations

import threading
from dataclasses import replace

from amanda_core import OpContext, Tool
from amanda_tools.kit.operators.clock import Clock
from amanda_tools.kit.tensors.types import describe_tensors
from amanda_tools.kit.tensors.values import facts_of
from amanda_tools.trace.result import TracedOp, TraceResult

__all__ = ["Trace"]


class Trace(Tool):
    """Records which operators run, in order, with module, source line, shapes and dtypes.

    Args:
        limit: Number of executions whose order is recorded; later ones are only counted.
        everything: Record operators outside the model as well, such as those of an optimizer or of
            a model's initialization. Collectives are always recorded.

    Raises:
        ValueError: `limit` is negative.

    >>> tool = Trace(limit=1000)
    """

    def __init__(self, limit: int = 100_000, everything: bool = False) -> None:
        super().__init__()
        if limit < 0:
            raise ValueError(f"limit must not be negative, but is {limit}")
        self.limit = limit
        self.everything = everything
        self._ops: list[TracedOp] = []
        self._known: dict[tuple[str, int], int] = {}
        self._sequence: list[int] = []
        self._left_out = 0
        # In graphs, routines run on the framework's threads.
        self._lock = threading.Lock()
        self._clock = Clock()
        self.add_inst_for_op(self.analyse, require_outputs=True)

    def analyse(self, context: OpContext) -> None:
        """Record the operator and insert a routine that counts its executions."""
        if context.zone != "model" and "wait" not in context and not self.everything:
            return
        key = (context.namespace, context.get_op_id())
        with self._lock, self._clock:
            index = self._known.setdefault(key, len(self._ops))
            if index == len(self._ops):
                self._ops.append(
                    TracedOp.of(
                        context,
                        inputs=describe_tensors(facts_of(context), context.get_inputs()),
                        outputs=describe_tensors(facts_of(context), context.get_outputs()),
                    )
                )
        context.insert_after_op(self.record, observe=True, outputs=[], index=index)

    def record(self, index: int) -> None:
        """Record one execution."""
        with self._lock, self._clock:
            self._ops[index].calls += 1
            if len(self._sequence) < self.limit:
                self._sequence.append(index)
            else:
                self._left_out += 1

    def result(self) -> TraceResult:
        """Return what was traced so far."""
        with self._lock:
            ops = [replace(op) for op in self._ops]
            return TraceResult(
                ops,
                list(self._sequence),
                self._left_out,
                tool_seconds=self._clock.spent / 1e9,
                wall_seconds=self._clock.wall / 1e9,
            )
