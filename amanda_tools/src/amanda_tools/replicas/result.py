"""`ReplicasResult` of one process, and `ReplicasReport`: what differs between the processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from amanda_core.results import Table
from amanda_tools.fingerprint.result import FingerprintResult
from amanda_tools.kit.output.rendering import Tabular, fields_of, format_count, render_json

__all__ = ["Kind", "ReplicasReport", "ReplicasResult", "Violation"]

#: What should be equal and is not: a ``weight``, or its ``gradient`` where an optimizer reads it;
#: a ``buffer``; ``random`` numbers; the ``output`` of an operator that reads the same in both
#: processes; the ``loss``; a value of which each process holds a replica (``value``). Or what is
#: wrong by a factor: the gradient of one weight (``scale``), or a ``norm`` of all gradients.
Kind = Literal["weight", "gradient", "buffer", "random", "output", "loss", "value", "scale", "norm"]


class ReplicasResult(FingerprintResult):
    """The record of one process, a fingerprint with more rows. `compare_replicas` reads it."""

    _format: ClassVar[str] = "amanda.replicas/1"


@dataclass
class Violation:
    """Something that should be equal in two processes and is not, or is wrong by a factor.

    Attributes:
        kind: What it is.
        what: What it is of, such as ``the gradient of weight '0.bias'``.
        processes: The processes in which it differs, such as ``rank0`` and ``rank1``.
        step: The step.
        op: Name of the operator at which it was found, or None.
        module: Module path of that operator.
        source: ``file:line`` of its call, or None.
        order: Its place in the order of execution of the first process.
        why: A sentence that says what that means.
        factor: By which factor it is wrong, if it is.
    """

    kind: Kind
    what: str
    processes: list[str]
    step: int
    op: str | None
    module: str
    source: str | None
    order: int
    why: str
    factor: float | None = None

    def __str__(self) -> str:
        """Describe where it is."""
        place = f", module {self.module!r}" if self.module else ""
        place += f", at {self.source}" if self.source else ""
        return f"{self.what}{place}, step {self.step}, {' and '.join(self.processes)}"


@dataclass
class ReplicasReport(Tabular):
    """Result of comparing the processes of one run.

    Attributes:
        violations: The first step with violations of each pair of processes, in order of execution.
        processes: The names of the processes.
        weights: Number of weights that are equal in two or more processes.
        compared: Kind -> number of comparisons that were made: ``weights`` in a step, their
            ``gradients``, and other ``values``.
        missing: What was not recorded, such as processes.
        notes: What else was found.
    """

    records = "violations", Violation

    violations: list[Violation] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)
    weights: int = 0
    compared: dict[str, int] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def first(self) -> Violation | None:
        """Return the first violation; None if there is none."""
        return self.violations[0] if self.violations else None

    @property
    def same(self) -> bool:
        """Return True if everything is equal that should be."""
        return not self.violations

    @property
    def complete(self) -> bool:
        """Return True if something was compared, and all processes have recorded the whole run."""
        return self.values > 0 and not self.missing

    @property
    def values(self) -> int:
        """Return the number of all values that were compared."""
        return sum(self.compared.values())

    @property
    def title(self) -> str:
        """Return a summary in one line."""
        return (
            f"{format_count(len(self.violations), 'violation')} in "
            f"{format_count(len(self.processes), 'process', 'processes')}; "
            f"{format_count(self.values, 'value')} compared, "
            f"{format_count(self.weights, 'replicated weight')}"
        )

    def conclusion(self, limit: int | None = 5) -> str:
        """Return what was found, in a few lines; first what was not compared.

        Args:
            limit: Number of missing things that are named; None for all.
        """
        texts = [*self.missing[:limit], *self.notes]
        if self.first is not None:
            texts += [f"First: {self.first}", self.first.why]
        elif not self.values:
            texts.append("No value is known to be equal in two processes: nothing was compared.")
        else:
            found = [f"{count} {kind}" for kind, count in self.compared.items() if count]
            texts.append(f"What was compared is equal bit for bit: {', '.join(found)}.")
        return "\n".join(texts)

    def table(self, everything: bool = False) -> Table:
        """Return a table with one row for each violation.

        Args:
            everything: Has no effect: what is equal is not listed.
        """
        columns = ("kind", "what", "step", "processes", "op", "source")
        rows = [
            (
                *(one.kind, one.what, one.step, " ".join(one.processes)),
                *(one.op or "", one.source or ""),
            )
            for one in self.violations
        ]
        return Table(self.title, columns, rows)

    def to_json(self) -> str:
        """Return the whole report as JSON."""
        content = {"same": self.same, "complete": self.complete, **fields_of(self)}
        return render_json({"format": "amanda.replicas_report/1", **content})
