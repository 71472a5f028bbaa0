"""What `NonFinite` found: the faults, and what was only passed on.

Owns the result and its forms, and the sentence that an error and a warning say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from amanda_core.results import OpFigures, Table
from amanda_tools.operators.entries import OpFacts
from amanda_tools.output.rendering import counted, dataframe, html_of, shares
from amanda_tools.tensors.statistics import Statistics

__all__ = ["Fault", "Looked", "NonFiniteResult", "Origin"]

#: Where a value that is not finite came from.
Origin = Literal["operator", "gradient", "parameter", "data", "constant"]


@dataclass
class Looked:
    """One tensor that had part in a fault.

    Attributes:
        position: Position in the operator's signature; ``2.0`` is the first of a list at 2.
        dtype: Name of its dtype.
        shape: Its shape.
        statistics: Its figures.
        first: Index of its first element that is not finite, or None.
    """

    position: str
    dtype: str
    shape: list[int]
    statistics: Statistics
    first: list[int] | None

    def __str__(self) -> str:
        """The tensor in words."""
        found = self.statistics
        text = f"{self.position}: {self.dtype}{self.shape}"
        if found.nan or found.inf:
            text += f" with {found.nan} nan and {found.inf} inf, the first at {self.first}"
        if found.min is not None:
            text += f", finite values from {found.min:.6g} to {found.max:.6g}"
        return text


@dataclass
class Fault(OpFacts):
    """One operator at which values stop being finite.

    Attributes:
        origin: ``operator``: its inputs were finite, its outputs are not. ``gradient``: the same of
            one of its backward operators. ``parameter``, ``data``, ``constant``: it was the first
            to read a parameter, a tensor of the program, or a number that was not finite.
        kind: ``nan`` or ``inf``.
        what: The backward operator, or the input that was not finite, by name; else empty.
        step: Step in which it happened first.
        calls: How often it happened.
        outputs: The outputs of the first time; empty where they were gone when it was found.
        inputs: The inputs of the first time.
    """

    origin: Origin
    kind: Literal["nan", "inf"]
    what: str
    step: int
    calls: int = 0
    outputs: list[Looked] = field(default_factory=list)
    inputs: list[Looked] = field(default_factory=list)

    def __str__(self) -> str:
        """The fault in words."""
        place = f"op {self.name!r} (id {self.id}"
        place += f", module {self.module!r}" if self.module else ""
        place += f", at {self.source})" if self.source else ")"
        text = {
            "operator": f"The result of {place} has {self.kind}, its inputs had none",
            "gradient": f"The gradient of {place}, by {self.what}, has {self.kind}, what arrived "
            "there had none",
        }.get(self.origin, f"The {self.origin} {self.what!r} of {place} has {self.kind}")
        lines = [f"{text}; step {self.step}"]
        lines += [f"  output {tensor}" for tensor in self.outputs]
        lines += [f"  input {tensor}" for tensor in self.inputs]
        return "\n".join(lines)


@dataclass
class NonFiniteResult:
    """What was found.

    Attributes:
        faults: In the order in which they happened; the first is where to look first.
        checked: Executions of operators and backward operators whose results were looked at.
        passed_on: Those that gave what is not finite because an input was not.
        allowed: Those that gave it and may.
        unchecked: Why tensors were not looked at -> how many.
        notes: Where nothing was looked at, and why.
        tool_seconds: Time that looking took.
        wall_seconds: Time from the first operator to the last.
    """

    faults: list[Fault] = field(default_factory=list)
    checked: int = 0
    passed_on: int = 0
    allowed: int = 0
    unchecked: dict[str, int] = field(default_factory=dict)
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def first(self) -> Fault | None:
        """The first fault, or None."""
        return self.faults[0] if self.faults else None

    def op_figures(self) -> Iterator[OpFigures]:
        """Return what happened at each operator, for the results of other tools."""
        for fault in self.faults:
            yield fault.figures({fault.origin: f"{fault.kind} in step {fault.step}"})

    def table(self) -> Table:
        """One row for each fault."""
        columns = ("origin", "kind", "op", "of", "step", "calls", "at", "source")
        rows = [
            (
                fault.origin,
                fault.kind,
                fault.name,
                fault.what,
                fault.step,
                fault.calls,
                str(fault.outputs[0].first) if fault.outputs else "",
                fault.source or "",
            )
            for fault in self.faults
        ]
        return Table(self.title, columns, rows)

    @property
    def title(self) -> str:
        """The result in one line."""
        faults, checked = counted(len(self.faults), "fault"), counted(self.checked, "execution")
        text = f"{faults} in {checked}, {self.passed_on} passed on"
        if self.allowed:
            text += f", {self.allowed} allowed"
        if self.unchecked:
            text += f"; {counted(sum(self.unchecked.values()), 'tensor')} not checked: "
            text += ", ".join(sorted(self.unchecked))
        parts = [text, *shares("looking", self.tool_seconds, self.wall_seconds)]
        return "; ".join([*parts, *self.notes])

    def to_json(self) -> str:
        """All of it."""
        return json.dumps({"format": "amanda.nonfinite/1", **asdict(self)}, indent=1)

    def to_dataframe(self) -> Any:
        """One row for each fault, as a `pandas.DataFrame`; needs pandas."""
        return dataframe(Fault, self.faults)

    def _repr_html_(self) -> str:
        return html_of([self.table()])
