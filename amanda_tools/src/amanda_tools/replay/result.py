"""`ReplayResult`: what an operator returned when it was executed again, beside what it returned."""

from __future__ import annotations

from dataclasses import dataclass, field

from amanda_core.results import Table
from amanda_tools.diff.numbers import Difference
from amanda_tools.kit.output.rendering import Tabular, fields_of, render_json

__all__ = ["ReplayResult", "Replayed"]


@dataclass
class Replayed:
    """One output of both executions.

    Attributes:
        position: Its position.
        difference: How far both are apart; None if their shapes differ.
        shapes: The shape that was recorded, and that of now.
        dtypes: The dtype that was recorded, and that of now.
    """

    position: str
    difference: Difference | None
    shapes: list[list[int]]
    dtypes: list[str]

    def __str__(self) -> str:
        """Describe how far both are apart."""
        kinds = self.dtypes[0] if self.dtypes[0] == self.dtypes[1] else " and ".join(self.dtypes)
        shapes = f"shapes {self.shapes[0]} and {self.shapes[1]}"
        return f"output {self.position} ({kinds}): {self.difference or shapes}"


@dataclass
class ReplayResult(Tabular):
    """Result of executing a recorded operator again.

    Attributes:
        op: Name of the operator.
        type: Its type.
        source: ``file:line`` of the recorded call, or None.
        step: The step.
        execution: Number of earlier executions of the operator.
        recorded: Framework, version and mode of the record.
        version: Framework and version of now.
        device: The device of now.
        dtype: The dtype to which inputs were converted; None if they were not.
        outputs: The outputs.
        notes: What else is not as it was when it was recorded.
    """

    records = "outputs", Replayed

    op: str
    type: str
    source: str | None
    step: int
    execution: int
    recorded: str
    version: str
    device: str
    dtype: str | None
    outputs: list[Replayed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Return True if all outputs are equal bit for bit."""
        return all(one.difference is not None and one.difference.equal for one in self.outputs)

    @property
    def title(self) -> str:
        """Return a summary in one line."""
        how = "the same bit for bit" if self.same else "not the same"
        how += f", with inputs as {self.dtype}" if self.dtype else ""
        place = f"step {self.step}, execution {self.execution}"
        return f"op {self.op!r}, {place}, on {self.device}: {how}"

    def conclusion(self) -> str:
        """Return what was found, in a few lines."""
        return "\n".join([*self.notes, *map(str, self.outputs)])

    def table(self) -> Table:
        """Return a table with one row for each output."""
        rows = []
        for one in self.outputs:
            found = one.difference
            figures = ("", "", "") if found is None else (found.max_abs, found.max_rel, found.ulp)
            cells = ["" if value in (None, "") else value for value in figures]
            rows.append((one.position, *one.dtypes, *cells))
        columns = ("output", "recorded as", "now", "max abs", "max rel", "ulp")
        return Table(self.title, columns, rows)

    def to_json(self) -> str:
        """Return the whole result as JSON."""
        return render_json({"format": "amanda.replay/1", "same": self.same, **fields_of(self)})
