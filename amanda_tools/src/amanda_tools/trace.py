"""`Trace`: record which operators a program runs, in which order, with their places and shapes.

Defines the record and its two forms, a table and JSON. Changes nothing in the program and imports
no framework.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

from amanda_core import OpContext, Tool
from amanda_core.results import Table
from amanda_tools.operators.clock import Clock
from amanda_tools.operators.entries import OpFacts
from amanda_tools.output import charts
from amanda_tools.output.rendering import (
    dataframe,
    describe_overhead,
    fields_of,
    format_count,
    render_html,
    render_json,
)
from amanda_tools.tensors.types import describe_tensors
from amanda_tools.tensors.values import facts_of

__all__ = ["Trace", "TraceResult", "TracedOp"]


@dataclass
class TracedOp(OpFacts):
    """One operator, as it was at its first execution.

    Attributes:
        inputs: Dtype and shape of each input, such as ``float32[8,3,32,32]``; None for an input
            that is not a tensor. An unknown dimension is ``?``.
        outputs: Dtype and shape of each output, in the same form.
        calls: Number of executions.
    """

    inputs: list[str | None]
    outputs: list[str | None]
    calls: int = 0


@dataclass
class TraceResult:
    """Result of a trace.

    Attributes:
        ops: The operators in the order of their first execution.
        sequence: Indices into `ops`, one for each execution.
        left_out: Number of executions after the limit of `sequence`. They are included in `calls`.
        tool_seconds: Time spent in the tool itself.
        wall_seconds: Time from the tool's first work to its last.
    """

    ops: list[TracedOp] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    left_out: int = 0
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0

    def table(self) -> Table:
        """Return a table with one row for each operator."""
        columns = ("op", "type", "inputs", "outputs", "calls", "source")
        rows = [
            (
                op.name,
                op.word or op.type,
                " ".join(text for text in op.inputs if text),
                " ".join(text for text in op.outputs if text),
                op.calls,
                op.source or "",
            )
            for op in self.ops
        ]
        executions = sum(op.calls for op in self.ops)
        notes = [
            f"{format_count(len(self.ops), 'operator')}, {format_count(executions, 'execution')}"
        ]
        if self.left_out:
            notes.append(f"the order of {self.left_out} is left out")
        notes += describe_overhead("tracing", self.tool_seconds, self.wall_seconds)
        return Table("; ".join(notes), columns, rows)

    def to_json(self) -> str:
        """Return the whole result as JSON."""
        calls = charts.measure("calls", "calls")
        drawn = [
            charts.figures(
                charts.figure("operators", len(self.ops)),
                charts.figure("executions", sum(op.calls for op in self.ops)),
            ),
            charts.icicle("Calls by module", "ops", calls),
            charts.bars("Calls", [("type", "ops", "word|type"), ("operator", "ops", "")], calls),
        ]
        content = {"format": "amanda.trace/1", **fields_of(self), "charts": drawn}
        return render_json(content)

    def to_dataframe(self) -> Any:
        """Return a `pandas.DataFrame` with one row for each operator; needs pandas."""
        return dataframe(TracedOp, self.ops)

    def _repr_html_(self) -> str:
        return render_html([self.table()])


class Trace(Tool):
    """Records which operators run, in order, with module, source line, shapes and dtypes.

    Args:
        limit: Number of executions whose order is recorded; later ones are only counted.
        everything: Record operators outside the model as well, such as those of an optimizer or of
            a model's initialization.

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
        if context.zone != "model" and not self.everything:
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
