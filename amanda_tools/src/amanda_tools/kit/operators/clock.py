"""`Clock`: measure how much of a program's time a tool takes itself."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amanda_core.driver_kit.recording import Recorder

__all__ = ["Clock"]


class Clock:
    """Measures the time spent in a tool, and the time since its first work, in nanoseconds.

    Use it as a context manager around each routine of the tool. It does not include what the driver
    adds to call these routines.

    >>> clock = Clock()
    >>> with clock:
    ...     total = sum(range(1000))
    >>> 0 < clock.spent == clock.wall
    True
    """

    def __init__(self) -> None:
        #: Time spent inside the context manager.
        self.spent = 0
        #: When the last interval ended.
        self.last = 0
        self._first: int | None = None
        self._local = threading.local()

    def __enter__(self) -> None:
        self._local.start = time.perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        end, start = time.perf_counter_ns(), self._local.start
        if self._first is None:
            self._first = start
        self.last = end
        self.spent += end - start

    def add(self, start: int, end: int) -> None:
        """Add an interval that was spent in the tool, in nanoseconds of one clock."""
        if self._first is None:
            self._first = start
        self.last = end
        self.spent += end - start

    def joined(self, other: Recorder) -> Clock:
        """Return a clock with the intervals of this one and of a driver's recorder."""
        clock = Clock()
        clock.spent = self.spent + other.spent
        clock._first, clock.last = self._first, max(self.last, other.last)
        if other.first:
            clock._first = other.first if self._first is None else min(self._first, other.first)
        return clock

    @property
    def wall(self) -> int:
        """Return the time from the first interval's start to the last one's end."""
        return 0 if self._first is None else self.last - self._first
