"""`Budget`: which runs are left out, so that a tool does not take too much time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from amanda_tools.kit.operators.clock import Clock

__all__ = ["Budget"]

#: How many times as long as the loop of `_unit` drivers take to call a routine, and a listener of
#: modules; measured on PyTorch.
_ROUTINE, _LISTENER = 4.0, 8.0
#: Number of runs that are left out at first. The caches are cold after the first run.
_MEASURED = 2


class Budget:
    """Leaves out runs, so that runs take at most some times their own time on average.

    The first run is not left out and does not count, since operators are analysed in it. The next
    two are left out, to measure how long the program takes itself; of all runs the fastest counts.
    Time between runs does not count.

    Args:
        clock: Measures the time spent in the tool.
        cost: How many times its own time a run may take; None if nothing is left out.

    Attributes:
        skips: Whether the current run is left out.
        skipped: Number of runs that were left out.
        runs: Number of runs that have ended.
        first: Duration of the first run, in nanoseconds.
        routines: Number of the tool's routines that were called in the current run.
        listeners: Number of its listeners that were called in the current run.
    """

    def __init__(self, clock: Clock, cost: float | None) -> None:
        self.skips = False
        self.skipped = self.runs = self.first = self.routines = self.listeners = 0
        self._clock, self._cost, self._unit = clock, cost, 0.0
        #: When the current run began, and the time spent in the tool until then.
        self._began: tuple[int, int] | None = None
        #: Duration of all runs but the first, and of the last one that was not left out.
        self._all = self._last = 0
        #: What the program itself took in the fastest run.
        self._own = 0.0

    @property
    def ratio(self) -> float | None:
        """Return how many times their own time the runs after the first took; None if unknown."""
        return self._all / (self._own * (self.runs - 1)) if self._own else None

    def begin(self) -> None:
        """Begin a run, if none has begun."""
        if self._began is None:
            self._began = time.perf_counter_ns(), self._clock.spent
            self.routines = self.listeners = 0

    def end(self, has_run: bool) -> None:
        """End a run; decide whether the next one is left out.

        Args:
            has_run: Whether an operator ran in it.
        """
        began, self._began = self._began, None
        if began is None or not has_run:
            return
        took = time.perf_counter_ns() - began[0]
        self.runs += 1
        if self.runs == 1:
            self.first, self._unit = took, _unit()
            self.skips = self._cost is not None
            return
        self._all += took
        calls = self.routines * _ROUTINE + self.listeners * _LISTENER
        rest = took - (self._clock.spent - began[1])
        own = max(rest - calls * self._unit, rest / 4)
        self._own = min(self._own, own) if self._own else own
        if self.skips:
            self.skipped += 1
        else:
            self._last = took
        if self._cost is not None:
            allowed = self._cost * self._own * self.runs
            self.skips = self.runs <= _MEASURED or self._all + self._last > allowed


def _unit() -> float:
    """Return how long a call of a small context manager takes here, in nanoseconds."""
    count = 100
    start = time.perf_counter_ns()
    for _ in range(count):
        with _nothing():
            pass
    return (time.perf_counter_ns() - start) / count


@contextmanager
def _nothing() -> Iterator[None]:
    yield
