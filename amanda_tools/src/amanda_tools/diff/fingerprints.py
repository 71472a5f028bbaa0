"""Comparison of two fingerprinted runs: name the operator at which they part.

Runs of several processes are compared rank by rank. The operator that is named is the first one,
in the order of execution, that wrote other values although it read the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from amanda_core.errors import ResultError
from amanda_core.results import Table
from amanda_core.results.output import processes_in
from amanda_tools.diff.created import (
    CreatedError,
    created_json,
    created_table,
    created_title,
    difference_in_kind,
    differing_precisions,
    largest_of,
    not_judged,
)
from amanda_tools.diff.norms import has_norms, judge_norms
from amanda_tools.diff.pairing import paired
from amanda_tools.diff.spread import Reach, reached, spread_chart, spread_table
from amanda_tools.fingerprint.files import (
    HANDLE,
    INPUT,
    NOBODY,
    NONE,
    OPS,
    REUSED,
    STATE,
    UNREADABLE,
    UNWRITTEN,
    Fingerprinted,
    load_fingerprint,
)
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.rendering import (
    dataframe,
    fields_of,
    format_count,
    render_html,
    render_json,
)

__all__ = ["Divergence", "FingerprintDiff", "compare_fingerprints", "is_fingerprint"]

#: Why a value differs where the runs part. ``operator``: it read the same and wrote something else.
#: ``writer``: it reads what was written since by something that was not seen. ``outside``: no
#: operator made what it reads, such as data or a weight. ``state``: it draws random numbers, and
#: the states of the generators differ. ``order``: an operator made what it reads in one run only.
#: ``coarse``: the runs were recorded by steps or modules, which do not show it.
Cause = Literal["operator", "writer", "outside", "state", "order", "coarse"]

#: Common types of operators that draw random numbers.
_RANDOM = ("random", "dropout")
#: Number of differing values that a result lists of each process.
_LISTED = 10_000


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
    """What one run has and the other has not.

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
class FingerprintDiff:
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

    def to_dataframe(self) -> Any:
        """Return a `pandas.DataFrame` with one row for each differing value; needs pandas."""
        return dataframe(Divergence, self.differing)

    def _repr_html_(self) -> str:
        return render_html([self.spread_table(), self.table()])


def is_fingerprint(path: Path) -> bool:
    """Return True if a folder has a fingerprint, or has those of the processes of a run."""
    if not path.is_dir():
        return False
    folders = [path, *processes_in(path)]
    return any((folder / one / OPS).exists() for folder in folders for one in ("", "fingerprint"))


def compare_fingerprints(
    a: Path | str, b: Path | str, ranks: Collection[int] | None = None
) -> FingerprintDiff:
    """Compare two fingerprinted runs, of one process or of several.

    Args:
        a: Folder of the results of the first run, or of its fingerprint.
        b: The same of the second run.
        ranks: Numbers of the processes to compare; None for all.

    Raises:
        ResultError: A fingerprint cannot be read, or the runs have no value in common.
        ImportError: NumPy is not installed.
    """
    first, second = _processes_of(Path(a)), _processes_of(Path(b))
    result = FingerprintDiff()
    named = None if ranks is None else {f"rank{number}" for number in ranks}
    for process in dict.fromkeys([*first, *second]):
        if named is not None and process not in named:
            continue
        one, other = first.get(process), second.get(process)
        if one is None or other is None:
            present = one or other
            assert present is not None
            run = "A" if one else "B"
            result.missing.append(Missing(process, run, "the whole process", len(present.rows)))
            continue
        _Comparison(one, other, process, result).run()
    if not result.values:
        raise ResultError(
            "The fingerprints have no value in common",
            where=f"{a} and {b}",
            fix="Record the same program twice",
        )
    # Several processes part one after another: the operator that is first and whose inputs agree
    # makes the difference, and collectives carry it to the others.
    starts = [one for one in result.differing if one.cause is not None]
    starts.sort(key=lambda one: (one.step, one.cause != "operator", one.order))
    result.first = starts[0] if starts else None
    result.created.sort(key=lambda one: -one.ratio)
    return result


def _processes_of(path: Path) -> dict[str | None, Fingerprinted]:
    """Return the fingerprints of a run by processes; a process that was started again counts
    once.
    """
    parts = processes_in(path) if path.is_dir() else []
    if not parts:
        return {None: load_fingerprint(path)}
    return {part.name.partition("-restart")[0]: load_fingerprint(part) for part in parts}


class _Comparison:
    """Compares the runs of one process."""

    def __init__(
        self,
        one: Fingerprinted,
        other: Fingerprinted,
        process: str | None,
        result: FingerprintDiff,
    ) -> None:
        self.one, self.other, self.process, self.result = one, other, process, result

    @property
    def _where(self) -> str:
        return "" if self.process is None else f", {self.process},"

    def run(self) -> None:
        """Add what differs and what is missing to the result."""
        import numpy

        one, other, result = self.one, self.other, self.result
        if one.level != other.level:
            raise ResultError(
                f"A is recorded by {one.level}, B by {other.level}",
                where=f"{one.folder} and {other.folder}",
                fix=f"Record both alike: amanda run -t fingerprint:level={one.level}",
            )
        for run, recorded in (("A", one), ("B", other)):
            if window := recorded.window:
                result.notes.append(f"In {run}{self._where} only {window} were recorded.")
            if not recorded.ended:
                self._note_early_end(run, recorded)
        mine, theirs = paired(one, other)
        for run, recorded, places in (("A", one, mine), ("B", other, theirs)):
            alone = numpy.ones(len(recorded.rows), bool)
            alone[places] = False
            self._note_missing(run, recorded, numpy.flatnonzero(alone))
        rows, others = one.rows[mine], other.rows[theirs]
        flags = rows["flags"] | others["flags"]
        unwritten = flags & UNWRITTEN != 0
        unreadable = (flags & UNREADABLE != 0) & ~unwritten
        states = rows["what"] == STATE
        handles = flags & HANDLE != 0
        compared = ~(unwritten | unreadable | states | handles) & (rows["what"] != NONE)
        reseeded = rows[states & (rows["digest"] != others["digest"])]
        types = numpy.asarray([*one.types, ""], object), numpy.asarray([*other.types, ""], object)
        numbers = [
            numpy.minimum(r["type"], len(t) - 1) for r, t in zip((rows, others), types, strict=True)
        ]
        retyped = types[0][numbers[0]] != types[1][numbers[1]]
        differs = compared & ((rows["digest"] != others["digest"]) | retyped)
        result.values += int(compared.sum())
        result.different += int(differs.sum())
        result.equal += int((compared & ~differs).sum())
        result.unwritten += int(unwritten.sum())
        result.unreadable += int(unreadable.sum())
        if not self._judge_norms(mine[compared], theirs[compared]):
            self._note_spread(rows, compared, differs)
        places = numpy.flatnonzero(differs)
        for number, place in enumerate(places[:_LISTED].tolist()):
            row, there = rows[place], others[place]
            found = self._describe(row, there, bool(retyped[place]))
            if number == 0:
                names = [
                    one.ops[state["op"]].name for state in reseeded if state["step"] == row["step"]
                ]
                self._explain(found, row, there, names)
            result.differing.append(found)

    def _judge_norms(self, mine: Any, theirs: Any) -> bool:
        """Judge the operators by their norms, if precisions, releases or modes differ; return True
        if it was done.
        """
        import numpy

        one, other, result = self.one, self.other, self.result
        if one.level != "operators":
            return False
        rows, others = one.rows[mine], other.rows[theirs]
        types, ops = (
            numpy.unique(numpy.stack([rows[name], others[name]]), axis=1).T.tolist()
            for name in ("type", "op")
        )
        dtypes = [(_dtype(one.types[a]), _dtype(other.types[b])) for a, b in types]
        for text in differing_precisions(dtypes):
            result.precisions += [text] if text not in result.precisions else []
        modes = {(one.ops[a].namespace, other.ops[b].namespace) for a, b in ops}
        named = [f"{a} in A and {b} in B" for a, b in sorted(modes) if a != b]
        if named:
            result.notes.append(f"Operators ran as {'; '.join(named)}, which may round otherwise.")
        exact = not (result.precisions or named)
        if exact or not (has_norms(one) and has_norms(other)):
            return False
        judged = judge_norms(one, other, mine, theirs)
        result.not_judged += judged.left_out
        for error in judged.created:
            error.process = self.process
        for reach in judged.spread:
            reach.process = self.process
        result.created += judged.created
        result.spread += judged.spread
        return True

    def _doubts(self, row: Any) -> list[str]:
        """Return what the execution of a row may have read that was not compared."""
        read = self.one.rows[self.one.rows["op"] == row["op"]]
        read = read[(read["what"] == INPUT) & (read["execution"] == row["execution"])]
        doubts = {
            HANDLE: "what a variable held",
            UNREADABLE: "an input without a digest",
            UNWRITTEN: "an input that nothing had written",
            REUSED: "an input that was not read again, which fingerprint:check=1 does",
        }
        found = [text for flag, text in doubts.items() if (read["flags"] & flag).any()]
        if self.one.ops[row["op"]].phase == "backward":
            found.append("what its forward pass saved")
        return found

    def _note_spread(self, rows: Any, compared: Any, differs: Any) -> None:
        """Add the modules and steps in which values differ, in the order of the first run."""
        import numpy

        modules = {op.module: n for n, op in enumerate(self.one.ops)}
        of_op = numpy.asarray([modules[op.module] for op in self.one.ops], numpy.uint64)
        keys = of_op[rows["op"]] << numpy.uint64(32) | rows["step"]
        found, group = numpy.unique(keys, return_inverse=True)
        counts = [
            numpy.bincount(group[which], minlength=len(found)) for which in (differs, compared)
        ]
        places = numpy.flatnonzero(differs)
        groups, first = numpy.unique(group[places], return_index=True)
        for index in numpy.argsort(first).tolist():
            row = rows[places[first[index]]]
            op = self.one.ops[row["op"]]
            numbers = [int(count[groups[index]]) for count in counts]
            self.result.spread.append(
                Reach(self.process, op.module, int(row["step"]), op.name, *numbers)
            )

    def _note_missing(self, run: str, recorded: Fingerprinted, places: Any) -> None:
        """Add the rows that only one run has, by operator."""
        import numpy

        rows = recorded.rows[places]
        # Loaders make room for batches whenever their workers have some, in any step.
        data = numpy.asarray([op.zone == "data" for op in recorded.ops], bool)
        room = data[rows["op"]] & ((rows["what"] == NONE) | (rows["flags"] & UNWRITTEN != 0))
        rows = rows[(rows["what"] != STATE) & ~room]
        _, first, counts = numpy.unique(rows["op"], return_index=True, return_counts=True)
        for index in numpy.argsort(first).tolist():
            row = rows[first[index]]
            place = f"{recorded.place_of(row)}, step {row['step']}"
            place += f", execution {row['execution']}" if recorded.level != "steps" else ""
            self.result.missing.append(Missing(self.process, run, place, int(counts[index])))

    def _note_early_end(self, run: str, recorded: Fingerprinted) -> None:
        where = self._where
        why = recorded.damage or "it broke off"
        last = ""
        if len(recorded.rows):
            row = recorded.rows[-1]
            last = f"; the last record is {recorded.place_of(row)}, step {row['step']}"
        self.result.notes.append(f"{run}{where} is not complete: {why}{last}")

    def _describe(self, row: Any, there: Any, retyped: bool) -> Divergence:
        op = self.one.ops[row["op"]]
        norms = float(row["norm"]), float(there["norm"])
        return Divergence(
            self.process,
            op.name,
            op.phase,
            self.one.place_of(row),
            op.module,
            op.source,
            int(row["step"]),
            int(row["execution"]),
            int(row["order"]),
            types=(self.one.types[row["type"]], self.other.types[there["type"]])
            if retyped
            else None,
            norms=norms if any(norms) and all(map(math.isfinite, norms)) else None,
            level=self.one.level,
        )

    def _explain(self, found: Divergence, row: Any, there: Any, states: list[str]) -> None:
        """Say why the first value of a process that differs does so: all before it is equal.

        Args:
            found: The value.
            row: Its row in the first run.
            there: Its row in the second run.
            states: The random generators whose states differed at the beginning of its step.
        """
        if found.level != "operators" and (found.level == "steps" or row["what"] == INPUT):
            found.cause, found.states = "coarse", states
        elif row["what"] != INPUT:
            op = self.one.ops[row["op"]]
            found.states = [name for name in states if name.startswith(op.namespace.split("/")[0])]
            found.cause = "state" if found.states and op.word in _RANDOM else "operator"
            found.doubts = self._doubts(row)
        else:
            made = [_producer(run, r) for run, r in ((self.one, row), (self.other, there))]
            found.producer = next((name for name in made if name is not None), None)
            if None not in made and made[0] == made[1]:
                found.cause = "writer"
            elif made == [None, None]:
                found.cause, found.states = "outside", states
            else:
                found.cause = "order"


def _producer(run: Fingerprinted, row: Any) -> str | None:
    if row["producer"] == NOBODY:
        return None
    made = run.rows[run.rows["order"] == row["producer"]]
    return run.ops[made[0]["op"]].name if len(made) else None
