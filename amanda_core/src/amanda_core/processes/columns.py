"""Columns of merged rows: how figures of one kind from several processes become one.

Owns the kinds, and which one a field has if its result does not say. Whole columns are merged at
once, because a run may have millions of figures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, Literal

__all__ = ["DIFFERS", "Column", "Kind", "Relation", "kind_of"]

#: ``sum`` of what each process has of its own, ``max`` and ``min``, ``slowest`` (the longest time,
#: and whose), ``range`` of what cannot be added, ``shared`` for what belongs to the model, of which
#: processes may have the same or different parts, ``same`` for what should be equal, ``empty`` if
#: there is no value.
Kind = Literal["sum", "max", "min", "slowest", "range", "shared", "same", "empty"]
#: How what others have of the model relates to what these have: ``alike``, all of it is here
#: (``within``), it has all that is here (``around``), they have nothing in common (``apart``).
Relation = Literal["alike", "within", "around", "apart", "mixed"]

#: In place of a text that is not the same in all processes.
DIFFERS = "(differs)"
_LARGEST = re.compile(r"(peak|at_peak|live|live_after|longest|largest|most|max|wall)(_.*)?|p\d+")
_SMALLEST = re.compile(r"(shortest|smallest|least|min)(_.*)?")
_SAME = re.compile(
    r"(.*_)?id|number|forward|rank|limit|step|call|execution|position|index|.*_per_.*"
)
_TIMES = ("s", "ns")
#: Kinds whose values are shown as ``1 to 2`` where they differ.
_RANGES = ("range", "shared")
_OF_PARTS = ("within", "around", "apart")


def kind_of(field: str, value: float, units: Mapping[str, str]) -> Kind:
    """Return the kind of a field by its name, its unit and a value.

    >>> kind_of("calls", 3, {}), kind_of("peak", 3, {}), kind_of("self", 3, {"self": "ns"})
    ('sum', 'max', 'slowest')
    """
    unit = units.get(field, "")
    if _SMALLEST.fullmatch(field):
        return "min"
    if unit in _TIMES:
        return "slowest"
    if _LARGEST.fullmatch(field):
        return "max"
    if _SAME.fullmatch(field) and not unit:
        return "same"
    return "sum" if isinstance(value, int) and unit != "%" else "range"


@dataclass
class Column:
    """A field of all rows of a part.

    Attributes:
        kind: How its values are merged.
        values: The merged values; None where no process has one. Of a range, the lower ends.
        more: Of a range the upper ends, and of times their sums.
        who: Of times, the process with the longest.
        count: Of times, how many processes have one.
    """

    kind: Kind
    values: list[Any]
    more: list[Any]
    who: list[str | None]
    count: list[int]

    @classmethod
    def of(cls, kind: Kind, values: list[Any], process: str | None) -> Column:
        """Return the column of one process."""
        if kind == "slowest":
            count = [int(value is not None) for value in values]
            return cls(kind, values, values, [process] * len(values), count)
        return cls(kind, values, values if kind in _RANGES else [], [], [])

    def at(self, positions: Sequence[int | None]) -> Column:
        """Return a column whose rows are those at these positions; None stands for no row."""

        def chosen(values: list[Any], default: Any = None) -> list[Any]:
            return [default if i is None else values[i] for i in positions] if values else []

        found = [chosen(self.values), chosen(self.more), chosen(self.who), chosen(self.count, 0)]
        return Column(self.kind, *found)

    def absorb(self, other: Column, relation: Relation = "alike") -> None:
        """Merge the same rows of other processes into this column.

        Args:
            other: Their column.
            relation: How their parts of the model relate to the parts of these, for one row that
                is about all parts.
        """
        if "empty" in (self.kind, other.kind) and self.kind != other.kind:
            if self.kind == "empty":
                none = Column.of(other.kind, self.values, None)
                self.kind, self.more, self.who = none.kind, none.more, none.who
                self.count = none.count
            else:
                other = Column.of(self.kind, other.values, None)
        elif self.kind != other.kind:
            self.kind = "same"  # Numbers in one process, and texts in another.
        if self.kind in ("same", "empty"):
            self._compare(other.values)
        elif self.kind in ("sum", "max", "min"):
            self.values = _MERGED[self.kind](self.values, other.values)
        elif self.kind == "shared" and relation in _OF_PARTS:
            if relation == "around":
                self.values, self.more = other.values, other.more
            elif relation == "apart":
                self.values = _sums(self.values, other.values)
                self.more = _sums(self.more, other.more)
        elif self.kind in _RANGES:
            self.values = _smallest(self.values, other.values)
            self.more = _largest(self.more, other.more)
        else:
            self._find_slowest(other)

    def _compare(self, others: list[Any]) -> None:
        if self.values != others:
            pairs = zip(self.values, others, strict=True)
            self.values = [
                mine if its is None or mine == its else its if mine is None else DIFFERS
                for mine, its in pairs
            ]

    def _find_slowest(self, other: Column) -> None:
        rows = zip(self.values, other.values, self.who, other.who, strict=True)
        self.who = [
            its if new is not None and (old is None or new > old) else mine
            for old, new, mine, its in rows
        ]
        self.values = _largest(self.values, other.values)
        self.more = _sums(self.more, other.more)
        self.count = list(map(add, self.count, other.count))

    def shown(self) -> list[Any]:
        """Return the values as a reader gets them."""
        if self.kind not in _RANGES:
            return self.values
        ends = zip(self.values, self.more, strict=True)
        return [low if low == high else f"{low:.6g} to {high:.6g}" for low, high in ends]

    def skew(self) -> list[float | None]:
        """Return how much longer than the mean the longest time is, as a factor."""
        rows = zip(self.values, self.more, self.count, strict=True)
        return [round(v * n / total, 3) if total else None for v, total, n in rows]


def _sums(left: list[Any], right: list[Any]) -> list[Any]:
    try:
        return list(map(add, left, right))
    except TypeError:
        return _where_known(add, left, right)


# The builtins `max` and `min` take four times as long.
def _largest(left: list[Any], right: list[Any]) -> list[Any]:
    try:
        return [a if a >= b else b for a, b in zip(left, right, strict=True)]  # noqa: FURB136
    except TypeError:
        return _where_known(max, left, right)


def _smallest(left: list[Any], right: list[Any]) -> list[Any]:
    try:
        return [a if a <= b else b for a, b in zip(left, right, strict=True)]  # noqa: FURB136
    except TypeError:
        return _where_known(min, left, right)


def _where_known(function: Any, left: list[Any], right: list[Any]) -> list[Any]:
    """Return the merged values of two columns in which None is not a value."""
    pairs = zip(left, right, strict=True)
    return [
        mine if its is None else its if mine is None else function(mine, its) for mine, its in pairs
    ]


_MERGED = {"sum": _sums, "max": _largest, "min": _smallest}
