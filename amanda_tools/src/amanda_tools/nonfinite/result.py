"""Result of `NonFinite`: the faults, and what was only passed on.

Also words the message of the error and the warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from amanda_core.results import OpFigures, Table
from amanda_tools.kit.operators.entries import OpFacts
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.rendering import (
    Tabular,
    describe_overhead,
    fields_of,
    format_count,
    render_json,
)
from amanda_tools.kit.tensors.statistics import Statistics
from amanda_tools.nonfinite.norms import Norms

__all__ = ["Fault", "Looked", "NonFiniteResult", "Origin"]

#: Origin of a value that is not finite.
Origin = Literal["operator", "gradient", "reduction", "parameter", "data", "constant"]


@dataclass
class Looked:
    """Description of one tensor that is part of a fault.

    Attributes:
        position: Position in the operator's signature; ``2.0`` is the first element of a list at 2.
        dtype: Name of the dtype.
        shape: The shape.
        statistics: The statistics.
        first: Index of its first element that is not finite, or None.
    """

    position: str
    dtype: str
    shape: list[int]
    statistics: Statistics
    first: list[int] | None

    def __str__(self) -> str:
        """Describe the tensor."""
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
        origin: ``operator``: its inputs were finite, its outputs are not. ``gradient``: the same
            for one of its backward operators. ``reduction``: a gradient was not finite after its
            reduction over processes, and none was before in this process in that step.
            ``parameter``, ``data``, ``constant``: it was the first to read a parameter, a tensor of
            the program, or a number that was not finite.
        kind: ``nan`` or ``inf``.
        what: Name of the backward operator, or of the input that was not finite; otherwise empty.
        step: Step in which it first happened.
        calls: Number of times that it happened.
        outputs: Outputs of the first time; empty if they were gone when the fault was found.
        inputs: Inputs of the first time.
    """

    origin: Origin
    kind: Literal["nan", "inf"]
    what: str
    step: int
    calls: int = 0
    outputs: list[Looked] = field(default_factory=list)
    inputs: list[Looked] = field(default_factory=list)

    def __str__(self) -> str:
        """Describe the fault."""
        place = f"op {self.name!r} (id {self.id}"
        place += f", module {self.module!r}" if self.module else ""
        place += f", at {self.source})" if self.source else ")"
        text = {
            "operator": f"The result of {place} has {self.kind}, its inputs had none",
            "gradient": f"The gradient of {place}, by {self.what}, has {self.kind}, what arrived "
            "there had none",
            "reduction": f"The gradient of parameter {self.what!r} has {self.kind} after its "
            "reduction, and no operator of this process has returned one: it is of another process",
        }.get(self.origin, f"The {self.origin} {self.what!r} of {place} has {self.kind}")
        lines = [f"{text}; step {self.step}"]
        lines += [f"  output {tensor}" for tensor in self.outputs]
        lines += [f"  input {tensor}" for tensor in self.inputs]
        return "\n".join(lines)


@dataclass
class NonFiniteResult(Tabular):
    """Result of `NonFinite`.

    Attributes:
        faults: The faults in the order in which they were found, which is that of the program
            unless `notes` say otherwise. Look at the first one first.
        checked: Number of executions of operators and backward operators whose results were
            checked.
        passed_on: Number of executions with non-finite outputs because of a non-finite input.
        allowed: Number of executions with non-finite outputs that were allowed.
        unchecked: Reason why tensors were not checked -> their number.
        notes: What was not observed, and why; where the order of faults is not the program's.
        tool_seconds: Time spent in the tool.
        wall_seconds: Time from the first operator to the last.
        gradient_steps: Steps in which norms of gradients were measured.
        gradients: Norms of the gradients of weights in these steps.
    """

    records = "faults", Fault

    faults: list[Fault] = field(default_factory=list)
    checked: int = 0
    passed_on: int = 0
    allowed: int = 0
    unchecked: dict[str, int] = field(default_factory=dict)
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    gradient_steps: list[int] = field(default_factory=list)
    gradients: list[Norms] = field(default_factory=list)

    @property
    def first(self) -> Fault | None:
        """Return the first fault, or None."""
        return self.faults[0] if self.faults else None

    def figures(self) -> dict[str, float | None]:
        """Return how many faults were found, and in how many executions."""
        return {"count": len(self.faults), "checked": self.checked}

    def op_figures(self) -> Iterator[OpFigures]:
        """Yield the fault of each operator in the form in which tools share them."""
        for fault in self.faults:
            yield fault.figures({fault.origin: f"{fault.kind} in step {fault.step}"})

    def table(self) -> Table:
        """Return a table with one row for each fault."""
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
        """Return a summary in one line."""
        faults, checked = (
            format_count(len(self.faults), "fault"),
            format_count(self.checked, "execution"),
        )
        text = f"{faults} in {checked}, {self.passed_on} passed on"
        if self.allowed:
            text += f", {self.allowed} allowed"
        if self.unchecked:
            text += f"; {format_count(sum(self.unchecked.values()), 'tensor')} not checked: "
            text += ", ".join(sorted(self.unchecked))
        parts = [text, *describe_overhead("looking", self.tool_seconds, self.wall_seconds)]
        return "; ".join([*parts, *self.notes])

    def to_json(self) -> str:
        """Return the whole result as JSON."""
        first = self.first
        figures = [
            charts.figure("faults", len(self.faults)),
            charts.figure("executions checked", self.checked),
            charts.figure("passed on", self.passed_on),
        ]
        if first is not None:
            detail = f"{first.kind} of the {first.origin} in step {first.step}"
            figures.insert(0, charts.figure("the first fault", first.name, "", detail, first.name))
        drawn = [charts.figures(*figures)]
        if self.faults:
            times = charts.measure("times", "calls")
            by = [("operator", "faults", ""), ("layer", "faults", "module")]
            drawn.append(charts.bars("Faults", by, times, ordered=True))
        if self.gradients:
            marks = [] if first is None else [{"at": first.step, "label": "the first fault"}]
            norms = {"kind": "lines", "title": "Norms of gradients", "part": "gradients"}
            settings = {
                "list": "norms",
                "name": "weight",
                "x": "gradient_steps",
                "x_label": "step",
                "log": True,
            }
            drawn.append({**norms, **settings, "marks": marks, "most": 8})
        # Each process has faults and gradients of its own.
        content = {"format": "amanda.nonfinite/1", "merge": {"faults": [], "gradients": []}}
        return render_json({**content, **fields_of(self), "charts": drawn})
