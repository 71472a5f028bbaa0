"""`Places`: chosen positions and rows, and where they lie in the values of operators.

Owns what a choice of positions means in a call, and the rule by which axes of a value are rows and
positions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from amanda_tools.kit.sequences.spans import Span

__all__ = ["Area", "NotChoosableError", "Numbers", "Places", "parse_numbers"]

#: A choice of numbers: ``3``, ``2:8``, ``-1``, or a list of numbers.
Numbers = str | Sequence[int]

_SLICE = re.compile(r"(-?\d{1,18})?:(-?\d{1,18})?(?::([1-9]\d{0,17}))?")


class NotChoosableError(Exception):
    """The rows and positions of a value are unknown; the message says why."""


def parse_numbers(given: Any, name: str) -> slice | frozenset[int] | None:
    """Return a choice of numbers; None for all.

    Args:
        given: A number, a list, a range, a slice, text such as ``2:8``; None for all.
        name: Its name, for messages.

    Raises:
        ValueError: It is none of these.

    >>> parse_numbers("-4:", "positions")
    slice(-4, None, None)
    """
    if given is None:
        return None
    if isinstance(given, slice) and (given.step is None or given.step > 0):
        return given
    if isinstance(given, range):
        given = list(given)
    if isinstance(given, str):
        if re.fullmatch(r"-?\d{1,18}", given.strip()):
            return frozenset({int(given)})
        found = _SLICE.fullmatch(given.strip())
        if found is not None:
            return slice(*(int(part) if part else None for part in found.groups()))
    elif type(given) is int:
        return frozenset({given})
    elif (
        isinstance(given, (list, tuple, set, frozenset))
        and given
        and all(type(number) is int for number in given)
    ):
        return frozenset(given)
    raise ValueError(
        f"{name} must be a number, a list of numbers, or text such as '2:8', not {given!r}"
    )


def _within(chosen: slice | frozenset[int] | None, start: int, length: int) -> list[int]:
    """Return the chosen ones of the numbers from `start` on, counted from `start`.

    A negative number counts from their end.
    """
    end = start + length
    if chosen is None:
        return list(range(length))
    if isinstance(chosen, frozenset):
        absolute = {number + end if number < 0 else number for number in chosen}
        return sorted(number - start for number in absolute if start <= number < end)
    first, stop = chosen.start or 0, chosen.stop
    first = first + end if first < 0 else first
    stop = end if stop is None else stop + end if stop < 0 else min(stop, end)
    stride = chosen.step or 1
    return [n - start for n in range(max(first, start), stop) if (n - first) % stride == 0]


@dataclass(frozen=True)
class Area:
    """The chosen part of one value.

    Attributes:
        rows: Chosen rows, counted from 0.
        offsets: Chosen positions, counted from the first one of the call.
        shape: The value's shape with an axis for rows and one for positions.
        axis: The axis of positions there; that of rows is 0.
        is_all: Whether all of the value is chosen.
        by_row: Whether each of the rows has one of the positions, in the same order.
    """

    rows: list[int]
    offsets: list[int]
    shape: tuple[int, ...]
    axis: int
    is_all: bool
    by_row: bool = False

    @property
    def is_empty(self) -> bool:
        """True if nothing is chosen."""
        return not self.rows or not self.offsets


class Places:
    """Chosen positions and rows.

    Args:
        positions: Absolute positions in the sequence; a negative one counts from the end of the
            call's positions. ``last`` is the last one of each row that the call's mask says is not
            padding. None for all.
        rows: Rows of the batch, chosen in the same way.
        axis: The axis of positions in the values, if it is not the one after the rows.

    Raises:
        ValueError: These are not numbers.

    >>> places = Places(positions="-2:", rows=0)
    >>> places.chosen_in(Span("model", call=0, rows=2, start=0, length=5))
    ([0], [3, 4])
    """

    def __init__(self, positions: Any = None, rows: Any = None, axis: int | None = None) -> None:
        #: Whether the last position of each row is chosen.
        self.by_row = positions == "last"
        self._positions = None if self.by_row else parse_numbers(positions, "positions")
        self._rows = parse_numbers(rows, "rows")
        if axis is not None and axis < 1:
            raise ValueError(f"axis must be at least 1, since axis 0 is that of rows; it is {axis}")
        self._axis = axis
        #: The last call, and what is chosen of the shapes in it: many values have the same.
        self._span: Span | None = None
        self._areas: dict[Any, Area] = {}

    @property
    def are_all(self) -> bool:
        """True if everything is chosen, so that the axes need not be known."""
        return self._positions is None and self._rows is None and not self.by_row

    def chosen_in(self, span: Span) -> tuple[list[int], list[int]]:
        """Return the chosen rows, and the chosen positions counted from the call's first one.

        Raises:
            NotChoosableError: The positions of the call are unknown.
        """
        if span.rows is None or span.start is None or span.length is None:
            raise NotChoosableError(span.unknown)
        rows = _within(self._rows, 0, span.rows)
        if self.by_row:
            if span.ends is None or span.unknown:
                raise NotChoosableError(span.unknown)
            rows = [row for row in rows if span.ends[row] >= 0]
            return rows, [span.ends[row] for row in rows]
        return rows, _within(self._positions, span.start, span.length)

    def area(self, shape: tuple[int | None, ...] | None, span: Span | None) -> Area:
        """Return the chosen part of a value.

        Args:
            shape: The value's shape.
            span: The positions of the call; None outside of any call.

        Raises:
            NotChoosableError: The rows and positions of the value are unknown.
        """
        if span is None:
            why = "it ran outside of any module, or its driver does not tell positions"
            raise NotChoosableError(why)
        if span is not self._span:
            self._span, self._areas = span, {}
        found = self._areas.get(shape)
        if found is None:
            found = self._areas[shape] = self._new_area(shape, span)
        return found

    def _new_area(self, shape: tuple[int | None, ...] | None, span: Span) -> Area:
        rows, offsets = self.chosen_in(span)
        assert span.rows is not None
        assert span.length is not None
        if shape is None or None in shape:
            raise NotChoosableError("its shape is not known")
        sizes = tuple(size for size in shape if size is not None)
        axis = 1 if self._axis is None else self._axis
        if len(sizes) <= axis or sizes[0] != span.rows or sizes[axis] != span.length:
            if self._axis is not None or not sizes or sizes[0] != span.rows * span.length:
                raise NotChoosableError(_misfit(sizes, span, axis))
            # Rows and positions are in one axis, as before a matrix product.
            sizes = (span.rows, span.length, *sizes[1:])
        is_all = not self.by_row and len(rows) == span.rows and len(offsets) == span.length
        return Area(rows, offsets, sizes, axis, is_all, self.by_row)


def _misfit(sizes: tuple[int, ...], span: Span, axis: int) -> str:
    assert span.rows is not None
    assert span.length is not None
    expected = f"{span.rows} rows on axis 0 and {span.length} positions on axis {axis}"
    text = f"its shape {list(sizes)} has not {expected}"
    others = [n for n, size in enumerate(sizes) if n > axis and size == span.length]
    if math.prod(sizes) and sizes[:1] == (span.rows,) and others:
        text += f"; axis={others[0]} may be meant"
    return text
