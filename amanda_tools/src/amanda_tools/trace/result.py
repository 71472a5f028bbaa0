"""`TraceResult`: the operators that a program ran, and their order; as a table and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

from amanda_core.results import Table
from amanda_tools.kit.operators.entries import OpFacts
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.rendering import (
    Tabular,
    describe_overhead,
    fields_of,
    format_count,
    render_json,
)

__all__ = ["TraceResult", "TracedOp"]


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
class TraceResult(Tabular):
    """Result of a trace.

    Attributes:
        ops: The operators in the order of their first execution.
        sequence: Indices into `ops`, one for each execution.
        left_out: Number of executions after the limit of `sequence`. They are included in `calls`.
        tool_seconds: Time spent in the tool itself.
        wall_seconds: Time from the tool's first work to its last.
        notes: What was not traced, and why.
    """

    records = "ops", TracedOp

    ops: list[TracedOp] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    left_out: int = 0
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

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
        return Table("; ".join([*notes, *self.notes]), columns, rows)

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
