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
        self._local.start = now = time.perf_counter_ns()
        if self._first is None:
            self._first = now

    def __exit__(self, *error: object) -> None:
        self._last = time.perf_counter_ns()
        self.spent += self._last - self._local.start

    @property
    def wall(self) -> int:
        """Time from the first entering to the last leaving."""
        return 0 if self._first is None else self._last - self._first
