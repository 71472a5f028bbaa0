"""Observers that need little: `Marks`, which only record when they were called, `without_context`.

Owns the record of marks. A driver may record the same without Python where that is faster, as in a
graph, in which each call of a routine takes ten times as long as a mark.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain
from typing import Any

from amanda_core.engine.action import Routine

__all__ = ["LIMIT", "PER_MARK", "Marks", "without_context"]

#: Drivers read it by this name in C.
_WITHOUT_CONTEXT = "__amanda_without_context__"

#: Numbers that a mark consists of: its own, the time, and the thread.
PER_MARK = 3
#: Number of marks after which `Marks.full` is called.
LIMIT = 1 << 16
#: The numbers of a series of marks, the time of each, and the thread.
Run = tuple[Sequence[int], Sequence[int], int]


class Marks:
    """Records of when a tool's operators were reached.

    A tool inserts `note` as an observer, and gets the records by `take` whenever it needs them,
    such as at the end of a step.

    Args:
        full: Called if many marks wait, from any thread; it should call `take`.
        clock: Returns the time in nanoseconds. A driver records marks itself only with the default
            clock.

    >>> marks = Marks(full=lambda: None)
    >>> marks.note(number=7)
    >>> [number for number, time, thread in marks.take()]
    [7]
    """

    #: Number of marks after which `full` is called.
    limit = LIMIT

    def __init__(
        self, full: Callable[[], object], clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.full, self.clock = full, clock
        self._noted = array("q")
        #: What drivers have recorded themselves; each call returns this and forgets it.
        self._sources: dict[Hashable, Callable[[], bytes]] = {}
        self._runs: list[Run] = []
        #: Number of marks in these.
        self._in_runs = 0

    def note(self, *values: Any, number: int) -> None:
        """Record a mark; the values are ignored."""
        self._noted.extend((number, self.clock(), threading.get_ident()))
        if len(self._noted) >= PER_MARK * LIMIT:
            self.full()

    def series(self, numbers: Sequence[int]) -> Callable[[Sequence[int]], None]:
        """Return a function that records marks that are always reached together, in one call.

        Args:
            numbers: Those of the marks, in the order of their times.

        >>> marks = Marks(full=lambda: None)
        >>> marks.series((4, 5))((100, 130))
        >>> [(numbers, times) for numbers, times, thread in marks.take_runs()]
        [((4, 5), (100, 130))]
        """

        def note(times: Sequence[int]) -> None:
            self._runs.append((numbers, times, threading.get_ident()))
            self._in_runs += len(numbers)
            if self._in_runs >= LIMIT:
                self.full()

        return note

    def take_runs(self) -> list[Run]:
        """Return the series of marks since the last call, in the order in which they ended."""
        found, self._runs, self._in_runs = self._runs, [], 0
        return found

    def source(self, key: Hashable, make: Callable[[], Callable[[], bytes]]) -> Any:
        """Return what a driver records marks with, made on first use.

        Args:
            key: Identifies the driver.
            make: Makes a function that returns all marks since its last call, in the form of an
                ``array("q")``: the number of each, its time and its thread.
        """
        if key not in self._sources:
            self._sources[key] = make()
        return self._sources[key]

    def take(self) -> Iterator[tuple[int, int, int]]:
        """Return the number, time and thread of all marks since the last call, by time."""
        return zip(*[iter(self.take_array())] * PER_MARK, strict=True)

    def take_array(self) -> array[int]:
        """Return what `take` does, one number after the other."""
        noted, self._noted = self._noted, array("q")
        others = [array("q", source()) for source in list(self._sources.values())]
        full = [part for part in (noted, *others) if part]
        if len(full) < 2:
            return full[0] if full else noted
        marks = [mark for part in full for mark in zip(*[iter(part)] * PER_MARK, strict=True)]
        marks.sort(key=lambda mark: mark[1])
        return array("q", chain.from_iterable(marks))

    @staticmethod
    def of(routine: Callable[..., Any]) -> Marks | None:
        """Return the marks whose `note` a routine is; None for other routines."""
        owner = getattr(routine, "__self__", None)
        return owner if isinstance(owner, Marks) and routine == owner.note else None


def without_context(routine: Routine) -> Routine:
    """Mark a routine that reads no context, which a driver then need not fill for an observer.

    >>> @without_context
    ... def look(value):
    ...     print(value)
    """
    setattr(routine, _WITHOUT_CONTEXT, True)
    return routine
