"""Assignment of time to executions: nested on a thread, overlapping in a graph.

Computes total, self and tool time, and the time between executions. Reads no clock: all times are
arguments, in nanoseconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from amanda_tools.kit.operators.entries import with_parents

__all__ = ["Between", "Interval", "Overlapping", "Stack", "around"]

T = TypeVar("T")


@dataclass(slots=True)
class Interval(Generic[T]):
    """One execution.

    Attributes:
        what: What was executed.
        start: Time at its start, in nanoseconds.
        end: Time at its end; equal to `start` until then.
        inner: Time of the executions directly inside, including what the tool took there.
        parent: The enclosing execution, or None.
        marks: Other measurements that started with it.
    """

    what: T
    start: int
    end: int
    inner: int = 0
    parent: Interval[T] | None = None
    marks: Any = None

    @property
    def total(self) -> int:
        """Return the nanoseconds from start to end."""
        return self.end - self.start


class Stack(Generic[T]):
    """The executions in progress on one thread, each inside the previous one.

    Attributes:
        open: These executions, the innermost last.
        dropped: Those that did not end, inner ones first; an exception ended them.
    """

    def __init__(self) -> None:
        self.open: list[Interval[T]] = []
        self.dropped: list[Interval[T]] = []

    def __contains__(self, what: T) -> bool:
        """Return True if an execution of this is in progress."""
        return any(interval.what is what for interval in self.open)

    @property
    def innermost(self) -> Interval[T] | None:
        """Return the innermost execution in progress, or None."""
        return self.open[-1] if self.open else None

    def enter(self, what: T, start: int, marks: Any = None) -> Interval[T]:
        """Start an execution, and return it.

        Args:
            what: What is executed.
            start: When the execution starts.
            marks: Other measurements that start with it.
        """
        parent = self.open[-1] if self.open else None
        interval = Interval(what, start, start, 0, parent, marks)
        self.open.append(interval)
        return interval

    def leave(self, what: T, end: int) -> Interval[T] | None:
        """End an execution, or return None if its start was not seen.

        Executions that started since and have not ended are dropped; their time counts for this
        one.
        """
        if not (self.open and self.open[-1].what is what) and what not in self:
            return None
        interval = self.open.pop()
        while interval.what is not what:
            self._give_up(interval)
            interval = self.open.pop()
        interval.end = end
        if interval.parent is not None:
            interval.parent.inner += end - interval.start
        return interval

    def spent(self, time: int) -> None:
        """Subtract time that the tool took from the innermost execution."""
        if self.open:
            self.open[-1].inner += time

    def clear(self) -> None:
        """Drop all executions in progress."""
        while self.open:
            self._give_up(self.open.pop())

    def take_dropped(self) -> list[Interval[T]]:
        """Return `dropped`, and forget these."""
        found, self.dropped = self.dropped, []
        return found

    def _give_up(self, interval: Interval[T]) -> None:
        if interval.parent is not None:
            interval.parent.inner += interval.inner
        self.dropped.append(interval)


class Overlapping(Generic[T]):
    """Executions that start and end on any thread, as in a graph.

    Attributes:
        busy: Nanoseconds in which at least one was running, for all steps that are settled.
        total: Sum of their times.
        running: Number of executions in progress.
    """

    def __init__(self) -> None:
        self.busy = self.total = self.running = 0
        self._open: dict[int, deque[Interval[T]]] = {}
        self._ended: list[tuple[int, int]] = []

    def enter(self, what: T, start: int) -> Interval[T]:
        """Start an execution, and return it."""
        self.running += 1
        interval = Interval(what, start, start)
        self._open.setdefault(id(what), deque()).append(interval)
        return interval

    def leave(self, what: T, end: int) -> Interval[T] | None:
        """End the oldest execution of `what`, or return None if there is none.

        If several are in progress, the sum of their times does not depend on which one ends.
        """
        waiting = self._open.get(id(what))
        if not waiting:
            return None
        self.running -= 1
        interval = waiting.popleft()
        interval.end = end
        self.total += interval.total
        self._ended.append((interval.start, end))
        return interval

    def settle(self) -> tuple[int, list[T]]:
        """Close the accounts of a step whose executions are over.

        Returns:
            The time in which at least one was running, and the executions that never ended.
        """
        busy = until = 0
        for start, end in sorted(self._ended):
            busy += max(0, end - max(start, until))
            until = max(until, end)
        self.busy += busy
        given_up = [interval.what for waiting in self._open.values() for interval in waiting]
        self._open.clear()
        self._ended.clear()
        self.running = 0
        return busy, given_up


class Between:
    """Time in which nothing runs, by the innermost module that contains the operators before and
    after.

    Attributes:
        times: Module path -> nanoseconds, without that of the modules inside.
        since: When the last execution in progress ended; None if one is running.
    """

    def __init__(self) -> None:
        self.times: dict[str, int] = {}
        self.since: int | None = None
        #: Path of the module of the last execution.
        self.module = ""

    def begin(self, time: int, module: str | None) -> None:
        """Record the end of the last execution in progress; None as `module` keeps the previous
        one.
        """
        self.since = time
        if module is not None:
            self.module = module

    def end(self, time: int, module: str | None) -> bool:
        """Record the start of an execution; return False if another one is running."""
        if self.since is None:
            return False
        place = around(self.module, self.module if module is None else module)
        self.add(place, time - self.since)
        self.since = None
        return True

    def add(self, path: str, time: int) -> None:
        """Add time in the module with a path."""
        self.times[path] = self.times.get(path, 0) + time

    def drop(self) -> None:
        """Do not count the interval that has begun."""
        self.since = None

    def forget(self) -> None:
        """Begin new accounts."""
        self.times = {}


@lru_cache(maxsize=4096)
def around(one: str, other: str) -> str:
    """Return the path of the innermost module that contains both."""
    others = with_parents(other)
    return next(path for path in reversed(with_parents(one)) if path in others)
