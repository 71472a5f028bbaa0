"""How much of a program's time a tool takes itself, which results say beside their numbers."""

from __future__ import annotations

import threading
import time

__all__ = ["Clock"]


class Clock:
    """Time spent in a tool, and since its first work, in nanoseconds.

    A context manager around each routine of the tool. What the driver adds to bring the tool to the
    operators is not in it.
    """

    def __init__(self) -> None:
        #: Time inside.
        self.spent = 0
        self._first: int | None = None
        self._last = 0
        self._local = threading.local()

    def __enter__(self) -> None:
        self._local.start = time.perf_counter_ns()

    def __exit__(self, *error: object) -> None:
        self.add(self._local.start, time.perf_counter_ns())

    def add(self, start: int, end: int) -> None:
        """Count a stretch of time inside, in nanoseconds of one clock."""
        if self._first is None:
            self._first = start
        self._last = end
        self.spent += end - start

    @property
    def wall(self) -> int:
        """Time from the first entering to the last leaving."""
        return 0 if self._first is None else self._last - self._first
