"""The result of comparing two fingerprinted runs: where they part, and what may explain it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from amanda_core.results import Table
from amanda_tools.diff.created import (
    CreatedError,
    created_json,
    created_table,
    created_title,
    difference_in_kind,
    largest_of,
    not_judged,
)
from amanda_tools.diff.spread import Reach, reached, spread_chart, spread_table
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.rendering import (
    Tabular,
    fields_of,
    format_count,
    render_html,
    render_json,
)

__all__ = ["LISTED", "Cause", "Divergence", "FingerprintDiff", "Missing"]

#: Why a value differs where the runs part. ``operator``: it read the same and wrote something else.
#: ``writer``: it reads what was written since by something that was not seen. ``outside``: no
#: operator made what it reads, such as data or a weight. ``state``: it draws random numbers, and
#: the states of the generators differ. ``order``: an operator made what it reads in one run only.
#: ``coarse``: the runs were recorded by steps or modules, which do not show it.
Cause = Literal["operator", "writer", "outside", "state", "order", "coarse"]
#: Number of differing values that a result lists of each process.
LISTED = 10_000


@dataclass
class Divergence:
    """One value that differs between the runs.

    Attributes:
        process: Which process it is in, such as ``rank1``; None if the run has one only.
        op: Name of the operator.
        phase: ``forward`` or ``backward``.
        what: What it is of the operator, such as ``output 0``.
        module: Module path of the operator.
        source: ``file:line`` of the call, or None.
        step: The step.
        execution: Number of earlier executions of the operator.
        order: Its place in the order of execution, in the first run.
        cause: Why it differs, if nothing before it does; else None.
        producer: The operator that wrote the value, or None.
        types: Dtype and shape in both runs, if they differ; else None.
        norms: Norms in both runs, if they were recorded and are finite; else None.
        doubts: What the operator may have read that was not compared.
        states: The random generators whose states differed at the beginning of the step, as far as
            they may be the cause.
        level: What was recorded: ``operators``, ``modules`` or ``steps``.
    """

    process: str | None
    op: str
    phase: str
    what: str
    module: str
    source: str | None
    step: int
    execution: int
    order: int
    cause: Cause | None = None
    producer: str | None = None
    types: tuple[str, str] | None = None
    norms: tuple[float, float] | None = None
    doubts: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    level: str = "operators"

    def __str__(self) -> str:
        """Describe where it is and why it differs."""
        place = f"{self.what}"
        place += f", module {self.module!r}" if self.module and self.level != "modules" else ""
        place += f", at {self.source}" if self.source else ""
        place += f", step {self.step}"
        place += f", execution {self.execution}" if self.level != "steps" else ""
        place += "" if self.process is None else f", {self.process}"
        if self.types is not None:
            place += f": {self.types[0]} and {self.types[1]}"
        elif self.norms is not None:
            place += f": norms {self.norms[0]:.9g} and {self.norms[1]:.9g}"
        return place

    @property
    def explanation(self) -> str:
        """Return what the difference comes from, in a few words."""
        states = ""
        if self.states:
            states = f" The random generators differ in this step: {', '.join(self.states)}."
        made = f"op {self.producer!r}" if self.producer else "an operator"
        doubts = f" Not compared is {'; '.join(self.doubts)}." if self.doubts else ""
        why = {
            "operator": "The tensors that it read are equal: this "
            f"{'operator' if self.level == 'operators' else 'module'} makes the difference."
            f"{doubts}",
            "writer": f"What {made} wrote is equal: something that is not an operator, or was not "
            "recorded, wrote it since.",
            "outside": "No operator made it: it comes from outside, such as data, or from an "
            "operator that was not recorded.",
            "state": "It draws random numbers.",
            "coarse": "The runs were recorded by modules or steps, which do not show what makes "
            "the difference.",
            "order": f"In one run {made} wrote it, in the other none or another one.",
        }.get(self.cause or "", "")
        if self.types is not None and _dtype(self.types[0]) != _dtype(self.types[1]):
            why = (
                "The runs have different precisions, so that no values are equal: record norms, "
                "with fingerprint:norms=true, or compare dumps, with "
                "dump:values=[inputs,weights,outputs]."
            )
        return why + states


def _dtype(text: str) -> str:
    return text.partition("[")[0]


@dataclass
class Missing:
    """Operators and values that only one of two runs has.

    Attributes:
        process: Which process it is in, such as ``rank1``; None if the run has one only.
        run: ``A`` or ``B``: the run that has it.
        what: What it is, in a few words.
        count: Number of values.
    """

    process: str | None
    run: str
    what: str
    count: int


@dataclass
class FingerprintDiff(Tabular):
    """Result of comparing two fingerprinted runs.

    Attributes:
        first: Where the runs part; None if no value differs.
        differing: The values that differ, in the order of the first run; at most 10,000 of each
            process.
        spread: The modules and steps in which values differ, in the order of the first run.
        values: Number of values that were compared.
        different: Number of those that differ.
        equal: Number of those that are equal bit for bit.
        unwritten: Number of values in memory that nothing had written, which were not compared.
        unreadable: Number of values without a digest in one run, which were not compared.
        missing: What only one run has.
        notes: What else was not compared, or not seen.
        precisions: Dtypes of the runs, such as ``float32 and bfloat16``, if they differ.
        created: The error that each execution makes at least, by its norms, from the largest to the
            smallest, if precisions, releases or modes differ and norms were recorded.
        not_judged: Number of executions whose created error is not known, then.
    """

    records = "differing", Divergence

    first: Divergence | None = None
    differing: list[Divergence] = field(default_factory=list)
    spread: list[Reach] = field(default_factory=list)
    values: int = 0
    different: int = 0
    equal: int = 0
    unwritten: int = 0
    unreadable: int = 0
    missing: list[Missing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    precisions: list[str] = field(default_factory=list)
    created: list[CreatedError] = field(default_factory=list)
    not_judged: int = 0

    @property
    def same(self) -> bool:
        """Return True if all values that were compared are equal; if operators are judged by norms,
        if no operator makes more error than its inputs and rounding explain.
        """
        if self.created:
            return not self.created[0].is_beyond
        return self.first is None

    @property
    def complete(self) -> bool:
        """Return True if each run has all that the other has, and all of it has a digest. Norms
        show only a part of an error.
        """
        return not (self.missing or self.unreadable or self.created)

    @property
    def again(self) -> str:
        """Return the command that records the window around the first difference in full; an empty
        text if there is none.
        """
        where = self.created[0] if self.created else self.first
        if where is None:
            return ""
        rank = "" if where.process is None else where.process.removeprefix("rank")
        tool = f"fingerprint:ranks={rank}," if rank.isdecimal() else "fingerprint:"
        if not isinstance(where, Divergence):
            values = "inputs,weights,outputs"
            values += ",gradients" if where.phase == "backward" else ""
            tool = f"dump:values=[{values}],everything=true,"
        elif where.level == "operators":
            tool = "dump:values=[gradients],calls=true,everything=true,"
        return f"amanda run -t '{tool}steps={where.step}' -o FOLDER PROGRAM"

    @property
    def title(self) -> str:
        """Return a summary in one line."""
        if self.created:
            return created_title(self.created)
        text = f"{self.different} of {format_count(self.values, 'value')} differ, "
        text += f"{self.equal} are equal bit for bit"
        if self.missing:
            text += f"; {sum(one.count for one in self.missing)} in one run only"
        if self.unreadable:
            text += f"; {self.unreadable} without a digest"
        if self.unwritten:
            text += f"; {self.unwritten} in memory that nothing had written left out"
        return text

    def conclusion(self, limit: int | None = 5) -> str:
        """Return what the comparison found, in a few lines; first what was not compared.

        Args:
            limit: Number of things that only one run has that are named; None for all.
        """
        texts = [
            f"Only in {one.run}{'' if one.process is None else f', {one.process}'}: {one.what}"
            for one in self.missing[:limit]
        ]
        more = len(self.missing) - len(self.missing[:limit])
        texts += [f"... and {more} more that only one run has"] if more else []
        texts += self.notes
        count = format_count(self.values, "value")
        if self.created:
            texts += self._conclusion_on_norms()
        elif self.first is not None:
            texts += [f"First: {self.first}", self.first.explanation, *reached(self.spread, limit)]
            texts.append(f"Record only this step, in full, in both runs: {self.again}")
        elif self.complete:
            texts.append(f"No difference in {count}: all are equal bit for bit.")
        else:
            texts.append(
                f"The {count} that both runs have are equal bit for bit; the rest was not compared."
            )
        return "\n".join(texts)

    def _conclusion_on_norms(self) -> list[str]:
        """Return what the norms show, and what they cannot show."""
        texts = [
            difference_in_kind(self.precisions),
            "Norms show how large an error is at least. They do not show one that keeps the norm "
            "and the largest magnitude, such as permuted or negated values: it is named where the "
            "first operator changes these.",
            *not_judged(self.not_judged),
            *largest_of(self.created),
        ]
        step = self.created[0].step
        return [*texts, f"Compare the values of step {step}: {self.again}"]

    def spread_table(self) -> Table:
        """Return a table with one row for each module and step in which values differ."""
        return spread_table(self.spread)

    def table(self, everything: bool = False) -> Table:
        """Return a table with one row for each value that differs.

        Args:
            everything: If operators are judged by norms, include all; else without effect, since
                equal values are not listed.
        """
        if self.created:
            return created_table(self.title, self.created, everything)
        columns = ("value", "step", "execution", "process", "module", "source")
        rows = [
            (
                one.what,
                one.step,
                one.execution,
                one.process or "",
                one.module,
                one.source or "",
            )
            for one in self.differing
        ]
        return Table(self.title, columns, rows)

    def to_json(self) -> str:
        """Return the whole result as JSON."""
        more = {"same": self.same, "complete": self.complete, "again": self.again}
        name, text = None, ""
        if self.created:
            name, text = self.created[0].op.name, str(self.created[0])
        elif self.first is not None:
            name, text = self.first.op, str(self.first)
        drawn = [
            charts.figures(
                charts.figure("values compared", self.values),
                charts.figure("different", self.different),
                charts.figure("most error" if self.created else "first", name, "", text),
            ),
            *([spread_chart()] if self.spread else []),
        ]
        content = {**more, **fields_of(self), "created": created_json(self.created)}
        content["charts"] = drawn
        return render_json({"format": "amanda.fingerprint_diff/1", **content})

    def _repr_html_(self) -> str:
        return render_html([self.spread_table(), self.table()])
