"""The result of comparing two dumps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from amanda_core.results import Table
from amanda_tools.diff.compared import Compared
from amanda_tools.diff.created import (
    CreatedError,
    created_json,
    created_table,
    created_title,
    difference_in_kind,
    largest_of,
    not_judged,
)
from amanda_tools.diff.spread import Reach, spread_chart
from amanda_tools.kit.operators.entries import OpFacts
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.rendering import Tabular, fields_of, format_count, render_json

__all__ = ["DiffResult"]


@dataclass
class DiffResult(Tabular):
    """Result of a comparison.

    Attributes:
        compared: The tensors that are in both dumps, in the order of the first; of files of another
            program and a dump, in the order of the dump.
        unmatched_a: Operators of the first dump without a counterpart. Across frameworks and
            modes this leaves out operators that only move or create values, and across precisions
            casts.
        unmatched_b: Operators of the second dump without a counterpart.
        alone: Number of tensors of matched operators that only one dump has.
        first_alone: The first of them in each dump, described; None if it has none.
        across: Whether values decide which operators correspond, as across frameworks.
        complete: Whether each dump has all that the other has, and all could be read. If values
            decide, what only one has does not count: two frameworks or implementations divide a
            network into other operators.
        uninitialized: Number of tensors that were not compared, because they have no values yet.
        precisions: Dtypes of the runs, such as ``float32 and bfloat16``, if they differ.
        created: The error that each execution makes, from the largest to the smallest, if the
            precisions, releases or modes of the runs differ and nobody gave a tolerance.
        not_judged: Number of executions whose created error is not known, then.
        jump: The first value that is not rounded, such as an index, and that differs since the
            values differ from which an operator made it, then; None if there is none.
        unread: What could not be read of files that another program wrote, and why.
        spread: The modules and steps in which tensors differ, in the order of the first run; if
            created errors are known, those in which operators make more than is explained.
        suspects: Operators of the first dump that part the runs before the first difference, unless
            the inputs of this one agree: what they read is in both dumps, and what they write, and
            all until the difference, is in one only. If inputs were not recorded, those without a
            counterpart that ran after the last operator that agrees.
        suspects_b: The same of the second dump, if inputs were recorded. These may be parts of the
            operator itself.
        likely: What kind of mistake the values show, such as ``scale: B is 8 times A``; None if
            they show none, or values do not decide which operators correspond.
    """

    records = "compared", Compared

    compared: list[Compared] = field(default_factory=list)
    unmatched_a: list[OpFacts] = field(default_factory=list)
    unmatched_b: list[OpFacts] = field(default_factory=list)
    alone: int = 0
    first_alone: tuple[str | None, str | None] = (None, None)
    across: bool = False
    complete: bool = True
    uninitialized: int = 0
    precisions: list[str] = field(default_factory=list)
    created: list[CreatedError] = field(default_factory=list)
    not_judged: int = 0
    jump: Compared | None = None
    unread: list[str] = field(default_factory=list)
    spread: list[Reach] = field(default_factory=list)
    suspects: list[OpFacts] = field(default_factory=list)
    suspects_b: list[OpFacts] = field(default_factory=list)
    likely: str | None = None

    @property
    def first(self) -> Compared | None:
        """Return the first tensor beyond the tolerance, or None.

        If values decide what corresponds, an output whose inputs agree comes before others.
        """
        differing = [one for one in self.compared if not one.same]
        sure = [one for one in differing if self.across and one.inputs_agree is True]
        return next(iter(sure or differing), None)

    @property
    def same(self) -> bool:
        """Return True if all tensors that are in both dumps are within the tolerance; if precisions
        differ, if no operator makes more error than they explain.

        `complete` says whether they are all tensors.
        """
        if self.created:
            return not self.created[0].is_beyond and all(one.difference for one in self.compared)
        return self.first is None

    def conclusion(self, limit: int | None = None) -> str:
        """Return what the comparison found, in a few lines; first what was not compared.

        Args:
            limit: Number of operators without a counterpart that are named; None for all.
        """
        texts = [f"Not read: {one}" for one in self.unread[:limit]]
        if len(texts) < len(self.unread):
            texts.append(f"Not read: {len(self.unread) - len(texts)} more")
        for name, ops in (("A", self.unmatched_a), ("B", self.unmatched_b)):
            if ops:
                named = ", ".join(op.name for op in ops[:limit])
                more = len(ops) - len(ops[:limit])
                texts.append(f"Only in {name}: {named}{f' and {more} more' if more else ''}")
        alone = [
            f"; first in {name}: {one}"
            for name, one in zip("AB", self.first_alone, strict=True)
            if one
        ]
        if self.created:
            if self.alone:
                count = format_count(self.alone, "tensor")
                texts.append(f"{count} that only one dump has were not compared{''.join(alone)}.")
            return "\n".join([*texts, *self._conclusion_on_precision()])
        if self.precisions:
            texts.append(
                f"The runs have different precisions ({'; '.join(self.precisions)}). Record what "
                "operators read, too, to see which one makes the error: "
                "dump:values=[inputs,weights,outputs]"
            )
        count = format_count(len(self.compared), "tensor")
        exact = all(one.difference is not None and one.difference.equal for one in self.compared)
        how = "equal bit for bit" if exact else "within the tolerance"
        if self.first is not None:
            texts.append(f"First: {self.first}")
            for name, ops in (("A", self.suspects), ("B", self.suspects_b)):
                suspects = (
                    f"op {op.name!r}{f', at {op.source}' if op.source else ''}"
                    for op in ops[:limit]
                )
                if ops:
                    texts.append(f"Only in {name}, just before it: {'; '.join(suspects)}")
            if self.likely is not None:
                texts.append(f"Likely {self.likely}")
        elif self.unread:
            texts.append(f"The {count} that could be read and correspond are {how}.")
        elif not self.complete:
            texts.append(
                f"The {count} that both dumps have are {how}. One dump has more, which was not "
                f"compared{''.join(alone)}."
            )
        elif self.unmatched_a or self.unmatched_b:
            texts.append(
                f"The {count} that correspond are {how}; the operators without a counterpart were "
                "not compared."
            )
        else:
            texts.append(f"No difference in {count}: all are {how}.")
        return "\n".join(texts)

    def _conclusion_on_precision(self) -> list[str]:
        texts = [difference_in_kind(self.precisions), *not_judged(self.not_judged)]
        if self.jump is not None:
            texts.append(f"What follows from this was not judged: {self.jump}")
        misshapen = next((one for one in self.compared if one.difference is None), None)
        if misshapen is not None:
            texts.append(f"First: {misshapen}")
        if misshapen is None or self.created[0].is_beyond:
            texts += largest_of(self.created)
        return texts

    @property
    def title(self) -> str:
        """Return a summary in one line."""
        if self.created:
            return created_title(self.created)
        beyond = sum(not one.same for one in self.compared)
        equal = sum(one.difference is not None and one.difference.equal for one in self.compared)
        text = f"{beyond} of {len(self.compared)} tensors differ, {equal} are equal bit for bit"
        if self.alone:
            text += f"; {format_count(self.alone, 'tensor')} in one dump only"
        if self.uninitialized:
            text += f"; {format_count(self.uninitialized, 'tensor')} without values yet left out"
        unmatched = len(self.unmatched_a), len(self.unmatched_b)
        if any(unmatched):
            text += f"; operators without counterpart: {unmatched[0]} and {unmatched[1]}"
        return text

    def table(self, everything: bool = False) -> Table:
        """Return a table with one row for each tensor that differs.

        Args:
            everything: Include the tensors that agree.
        """
        if self.created:
            return created_table(self.title, self.created, everything)
        columns = ("op", "tensor", "step", "max abs", "max rel", "cosine", "ulp", "beyond")
        rows = [
            (
                one.a.name if one.a.name == one.b.name else f"{one.a.name} | {one.b.name}",
                f"{one.what} {one.position}{f' {one.weight}' if one.weight else ''}",
                one.step,
                *_cells(one),
            )
            for one in self.compared
            if everything or not one.same
        ]
        return Table(self.title, columns, rows)

    def to_json(self) -> str:
        """Return the whole result as JSON."""
        return render_json(
            {
                "format": "amanda.diff/1",
                "same": self.same,
                "first": self.first,
                **fields_of(self),
                "created": created_json(self.created),
                "charts": self._charts(),
            }
        )

    def _charts(self) -> list[charts.Chart]:
        beyond = sum(not one.same for one in self.compared)
        first = self.first
        figures = [
            charts.figure("tensors compared", len(self.compared)),
            charts.figure("beyond the tolerance", beyond),
        ]
        if first is not None:
            figures.append(charts.figure("first", first.a.name, "", first.what, first.a.name))
        figures.append(charts.figure("in one dump only", self.alone))
        return [
            charts.figures(*figures),
            *([spread_chart()] if self.spread else []),
            charts.points(
                "Where the runs diverge",
                "compared",
                "difference.max_abs",
                value_label="largest difference",
                label="a.name",
                color="what",
                first="first",
                log=True,
                x_label="in the order of the first dump",
            ),
        ]


def _cells(one: Compared) -> Sequence[object]:
    difference = one.difference
    if difference is None:
        return ("", "", "", "", f"shapes {one.shapes[0]} and {one.shapes[1]}")
    numbers = (difference.max_abs, difference.max_rel, difference.cosine, difference.ulp)
    inputs = ["" if number is None else float(f"{number:.4g}") for number in numbers]
    beyond: object = difference.beyond
    if difference.first is None and difference.values:
        beyond = ", ".join(difference.values)
    return (*inputs, beyond)
