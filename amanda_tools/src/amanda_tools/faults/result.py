"""The result of `inject_faults`: every fault, which can be injected again, and sums by operator."""

from __future__ import annotations

from dataclasses import dataclass, field

from amanda_core.results import Table
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.rendering import Tabular, fields_of, format_count, render_json
from amanda_tools.kit.weights.coverage import UnreachedWeight, describe_coverage

__all__ = ["Fault", "FaultSite", "FaultsResult"]


@dataclass(frozen=True)
class Fault:
    """One changed element.

    Attributes:
        run: Number of the run.
        op_id: Id of the operator, the same in every process.
        call: Number of the operator's execution in this run, from 0; -1 for a fault in a weight,
            which stays for the run.
        position: Position of the value among the inputs, outputs or gradients.
        index: Flat index of the element.
        before: Its bits before, as an unsigned integer.
        after: Its bits afterwards.
    """

    run: int
    op_id: int
    call: int
    position: int
    index: int
    before: int
    after: int


@dataclass
class FaultSite:
    """An operator at which faults are injected.

    Attributes:
        op: Readable name of the operator.
        source: ``file:line`` of its call, or None.
        value: ``input``, ``weight``, ``output`` or ``gradient``, and its position.
        dtype: Its dtype; empty before the first execution.
        calls: How often it was executed in all runs.
        elements: How many elements it had in all executions.
        faults: How many of them were changed.
    """

    op: str
    source: str | None
    value: str
    dtype: str = ""
    calls: int = 0
    elements: int = 0
    faults: int = 0


@dataclass
class FaultsResult(Tabular):
    """The injected faults.

    Attributes:
        sites: The operators.
        faults: The faults, to be passed as ``replay``.
        runs: How many runs there were.
        notes: What could not be changed, and why.
        parameters: How many elements the matrices among the parameters of the models have, if the
            faults are in weights.
        reached: How many of these are in operators where faults are injected.
        unreached: The others: which parameters, how many elements, and why.
    """

    records = "faults", Fault

    sites: list[FaultSite]
    faults: list[Fault] = field(default_factory=list)
    runs: int = 1
    notes: list[str] = field(default_factory=list)
    parameters: int = 0
    reached: int = 0
    unreached: list[UnreachedWeight] = field(default_factory=list)

    def table(self) -> Table:
        """Return a table with a row for each operator and one for their sum."""
        rows = [(s.op, s.value, s.dtype, s.calls, s.elements, s.faults) for s in self.sites]
        sums = [sum(row[column] for row in rows) for column in (3, 4, 5)]  # type: ignore[misc]
        title = f"{format_count(sums[2], 'fault')} in {format_count(self.runs, 'run')}"
        parts = [title, *describe_coverage(self.parameters, self.reached, self.unreached)]
        columns = ("op", "value", "dtype", "calls", "elements", "faults")
        return Table("; ".join([*parts, *self.notes]), columns, [*rows, ("all", "", "", *sums)])

    def to_json(self) -> str:
        """Return the result as JSON."""
        drawn = [
            charts.bars("Faults", [("operator", "sites", "op")], charts.measure("faults", "faults"))
        ]
        merge = {
            "sites": ["op", "value"],
            "faults": [],
            "runs": "max",
            **dict.fromkeys(("parameters", "reached", "unreached"), "shared"),
        }
        content = {"format": "amanda.inject_faults/1", "merge": merge, **fields_of(self)}
        return render_json({**content, "charts": drawn})
