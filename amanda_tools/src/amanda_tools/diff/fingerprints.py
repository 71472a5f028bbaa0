"""Comparison of two fingerprinted runs: name the operator at which they part.

Runs of several processes are compared rank by rank. The operator that is named is the first one,
in the order of execution, that wrote other values although it read the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from amanda_core.errors import ResultError
from amanda_core.results.output import processes_in
from amanda_tools.diff.created import differing_precisions
from amanda_tools.diff.divergence import LISTED, Divergence, FingerprintDiff, Missing
from amanda_tools.diff.norms import has_norms, judge_norms
from amanda_tools.diff.pairing import paired
from amanda_tools.diff.spread import Reach
from amanda_tools.fingerprint.files import (
    HANDLE,
    INPUT,
    NOBODY,
    NONE,
    REUSED,
    STATE,
    UNREADABLE,
    UNWRITTEN,
    Fingerprinted,
    load_fingerprint,
    place_of,
)

__all__ = ["Divergence", "FingerprintDiff", "compare_fingerprints", "is_fingerprint"]

#: Common types of operators that draw random numbers.
_RANDOM = ("random", "dropout")


def is_fingerprint(path: Path) -> bool:
    """Return True if a folder has a fingerprint, or has those of the processes of a run."""
    if not path.is_dir():
        return False
    return any(place_of(folder) is not None for folder in (path, *processes_in(path)))


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
        for number, place in enumerate(places[:LISTED].tolist()):
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
        texts = ((one.types[a], other.types[b]) for a, b in types)
        dtypes = [(a.partition("[")[0], b.partition("[")[0]) for a, b in texts]
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
            if self.one.level != "operators":
                found.append("the gradients that it read")
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
