"""The result of `steer`: the changed operators, and how often each was changed."""

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
from amanda_tools.kit.weights.coverage import UnreachedWeight, describe_coverage

__all__ = ["SteerResult", "SteeredOp"]


@dataclass
class SteeredOp(OpFacts):
    """One operator whose values are changed.

    Attributes:
        what: ``input`` or ``output``.
        shape: Dtype and shape of the value at its first execution.
        calls: How often it ran; None where the change is a part of a compiled program.
        changed: In how many of these something was chosen and changed; None likewise.
        positions: How many rows times positions were changed in all; None if positions are not
            known, since no row or position was chosen.
    """

    what: str = "output"
    shape: str = ""
    calls: int | None = 0
    changed: int | None = 0
    positions: int | None = None


@dataclass
class SteerResult(Tabular):
    """The changes of one run.

    Attributes:
        edit: The change.
        ops: The chosen operators; a module's values are those of operators called
            ``module_input`` and ``module_output``.
        notes: Where the tool is not supported, and patterns that chose nothing.
        tool_seconds: Time that the changes took.
        wall_seconds: Time from the first to the last.
        parameters: If weights were changed, how many elements the matrices of the model have.
        reached: How many of these were changed where they were read.
        unreached: The others: which parameters, how many elements, and why.
    """

    records = "ops", SteeredOp

    edit: str
    ops: list[SteeredOp] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0
    parameters: int = 0
    reached: int = 0
    unreached: list[UnreachedWeight] = field(default_factory=list)

    @property
    def changed(self) -> int:
        """The number of changed values, without those in compiled programs."""
        return sum(op.changed or 0 for op in self.ops)

    @property
    def title(self) -> str:
        """A summary of the changes in one line."""
        within = sum(op.changed is None for op in self.ops)
        ops = format_count(len(self.ops) - within, "operator")
        changed = [f"{format_count(self.changed, 'value')} of {ops} changed"]
        if within == len(self.ops) and within:
            changed = []
        if within:
            ops = format_count(within, "operator")
            changed.append(f"those of {ops} within compiled programs, in all calls")
        return "; ".join(
            [
                f"{self.edit}: {'; '.join(changed)}",
                *describe_overhead("changing", self.tool_seconds, self.wall_seconds),
                *describe_coverage(self.parameters, self.reached, self.unreached),
                *self.notes,
            ]
        )

    def table(self) -> Table:
        """Return one row for each operator."""
        rows = [
            (
                op.name,
                op.what,
                op.shape,
                "" if op.calls is None else op.calls,
                "" if op.changed is None else op.changed,
                _shown(op.positions),
                op.source or "",
            )
            for op in self.ops
        ]
        columns = ("op", "value", "first", "calls", "changed", "positions", "source")
        return Table(self.title, columns, rows)

    def to_json(self) -> str:
        """Return the whole result as JSON."""
        changed = charts.measure("values changed", "changed")
        drawn = [
            charts.figures(
                charts.figure("values changed", self.changed, "", self.edit),
                charts.figure("operators", len(self.ops)),
            ),
            charts.bars("Changed", [("operator", "ops", "")], changed),
        ]
        merge = {
            "ops": ["namespace", "id", "what"],
            "positions": "range",
            **dict.fromkeys(("parameters", "reached", "unreached", "elements"), "shared"),
        }
        content = {"format": "amanda.steer/1", "merge": merge, **fields_of(self)}
        return render_json({**content, "charts": drawn})


def _shown(number: int | None) -> object:
    return "all" if number is None else number
