"""The result of `rematerialize`: what was evicted and computed again, and what the budget cost.

Owns how it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from amanda_core.results import Table
from amanda_tools.kit.operators.entries import OpFacts
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.rendering import (
    Tabular,
    fields_of,
    format_count,
    format_quantity,
    render_json,
)

__all__ = ["RematerializeResult", "RematerializedOp"]


@dataclass
class RematerializedOp(OpFacts):
    """An operator whose values may be evicted.

    Attributes:
        calls: How often it ran in the program.
        made: Bytes that it allocates for its outputs and for backward, at most.
        evicted: How often one of its values was evicted.
        repeated: How often it ran again.
        gradients: Bytes that its backward is expected to allocate, at its last execution.
        saved: Bytes of the values that it saved then, which its backward reads.
    """

    calls: int = 0
    made: int = 0
    evicted: int = 0
    repeated: int = 0
    gradients: int = 0
    saved: int = 0


@dataclass
class RematerializeResult(Tabular):
    """The memory in use, and the operators that ran again to stay within the budget.

    Attributes:
        budget: The budget in bytes; None if nothing was to be evicted.
        peak: Maximum of the bytes in use: parameters, gradients, and all values that operators
            made. What an operator allocates and frees itself, its workspace, is not in it.
        floor: A budget that is large enough: for an operator with its inputs, outputs and
            gradients, and for computing its inputs again, beside what cannot be evicted.
        ops: The operators.
        computed_seconds: Time that operators took the first time, without backward.
        repeated_seconds: Time that running them again took.
        notes: What takes no part, and why.
        measured: The steps of which the peak and the floor are, if other steps ran as well: what
            these need is unknown. Empty if all steps were measured.
    """

    records = "ops", RematerializedOp

    budget: int | None
    peak: int = 0
    floor: int = 0
    ops: list[RematerializedOp] = field(default_factory=list)
    computed_seconds: float = 0.0
    repeated_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    measured: list[int] = field(default_factory=list)

    def table(self) -> Table:
        """Return a table with a row for each operator, the most often repeated first."""
        ops = sorted(self.ops, key=lambda op: (-op.repeated, -op.made))
        rows = [
            (op.name, op.calls, format_quantity(op.made, "B"), op.evicted, op.repeated)
            for op in ops
        ]
        budget = "without a budget"
        if self.budget is not None:
            budget = f"of {format_quantity(self.budget, 'B')}"
        states = ", with states of random numbers, which the peak leaves out"
        if not self.floor:
            title = "; ".join(["no operator took part, so no peak is known", *self.notes])
            return Table(title, ("op", "calls", "makes", "evicted", "repeated"), [])
        parts = [
            # Exactly, since it is what a reader gives as the budget next.
            f"Peak {format_quantity(self.peak, 'B')} {budget}, at least {self.floor:,} bytes "
            f"needed{' in the steps that were measured' if self.measured else ''}"
            f"{states if self.floor > self.peak else ''}",
            *self._unknown(),
            f"{sum(op.evicted for op in ops)} evicted, {sum(op.repeated for op in ops)} computed "
            f"again in {self.repeated_seconds:.3g} s beside {self.computed_seconds:.3g} s",
            "workspaces inside an operator not counted",
            *self.notes,
        ]
        return Table("; ".join(parts), ("op", "calls", "makes", "evicted", "repeated"), rows)

    def _unknown(self) -> list[str]:
        """Return which steps were measured, as a sentence, if these are not all."""
        if not self.measured:
            return []
        last = max(self.measured)
        return [
            f"measured were {format_count(len(self.measured), 'step')} up to {last}; whether "
            "others need more is unknown: select them, such as all by `--steps 0:`"
        ]

    def to_json(self) -> str:
        """Return the result as JSON. Sizes are in bytes, times in seconds."""
        drawn = [
            charts.figures(
                charts.figure("peak", self.peak or None, "B", "; ".join(self._unknown())),
                charts.figure("budget", self.budget, "B"),
                charts.figure("smallest budget", self.floor or None, "B"),
                charts.figure("time computing again", self.repeated_seconds, "s"),
            ),
            charts.bars(
                "Computed again",
                [("operator", "ops", "name"), ("type", "ops", "type")],
                charts.measure("repeated", "repeated"),
                charts.measure("evicted", "evicted"),
            ),
        ]
        content = {"format": "amanda.rematerialize/1", "merge": {"budget": "same", "floor": "max"}}
        return render_json({**content, **fields_of(self), "charts": drawn})
