"""Which stretch of time belongs to which execution: nested on a thread, overlapping in a graph.

Owns the accounts of time: total, self and tool time, and what passes between executions.
Reads no clock: times are given, in nanoseconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from amanda_tools.operators.entries import with_parents

__all__ = ["Between", "Interval", "Overlapping", "Stack"]

T = TypeVar("T")


@dataclass(slots=True)
class Interval(Generic[T]):
    """One execution of something.

    Attributes:
        what: What was executed.
        start: When it began.
        end: When it ended; until then the same as `start`.
        inner: Time of the executions that it held directly, with what the tool took there.
        parent: The execution that holds it, or None.
        marks: What else was begun with it.
    """

    what: T
    start: int
    end: int
    inner: int = 0
    parent: Interval[T] | None = None
    marks: Any = None

    @property
    def total(self) -> int:
        """Time from its begin to its end, without what the tool took of it."""
        return self.end - self.start

    @property
    def self(self) -> int:
        """Time in itself alone."""
        return self.end - self.start - self.inner


class Stack(Generic[T]):
    """The executions that one thread is in, each inside the one before."""

    def __init__(self) -> None:
        self._open: list[Interval[T]] = []
        self._given_up: list[Interval[T]] = []

    @property
    def innermost(self) -> Interval[T] | None:
        """The execution that it is in."""
        return self._open[-1] if self._open else None

    def enter(self, what: T, arrived: int, start: int, marks: Any = None) -> None:
        """Begin an execution.

        Args:
            what: What is executed.
            arrived: When the tool was called; the time to `start` is its own.
            start: When the execution begins.
            marks: What else was begun with it.
        """
        self.spent(start - arrived)
        self._open.append(Interval(what, start, start, parent=self.innermost, marks=marks))

    def leave(self, what: T, end: int) -> Interval[T] | None:
        """End an execution; None if its begin was not seen.

        What was entered since and has not ended is given up, and its time belongs to this one.
        """
        if not any(interval.what is what for interval in self._open):
            return None
        while True:
            interval = self._open.pop()
            if interval.what is what:
                break
            self._give_up(interval)
        interval.end = end
        if interval.parent is not None:
            interval.parent.inner += interval.total
        return interval

    def spent(self, time: int) -> None:
        """Take time that the tool itself took out of the innermost execution."""
        if self._open:
            self._open[-1].inner += time

    def clear(self) -> None:
        """Give up all that has not ended."""
        while self._open:
            self._give_up(self._open.pop())

    def given_up(self) -> list[Interval[T]]:
        """Return what never ended, since an exception left it; each once, inner ones first."""
        found, self._given_up = self._given_up, []
        return found

    def _give_up(self, interval: Interval[T]) -> None:
        if interval.parent is not None:
            interval.parent.inner += interval.inner
        self._given_up.append(interval)


class Overlapping(Generic[T]):
    """Executions that begin and end on any threads, as those of a graph.

    Attributes:
        busy: Time in which at least one of them was running, as far as it is settled.
        total: Their times added up.
        running: How many are running.
    """

    def __init__(self) -> None:
        self.busy = self.total = self.running = 0
        self._open: dict[int, deque[Interval[T]]] = {}
        self._ended: list[tuple[int, int]] = []

    def enter(self, what: T, start: int) -> None:
        """Begin an execution."""
        self.running += 1
        self._open.setdefault(id(what), deque()).append(Interval(what, start, start))

    def leave(self, what: T, end: int) -> Interval[T] | None:
        """End the oldest execution of `what`; None if there is none.

        Which of several it was does not matter to the sum of their times.
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
        """Settle the accounts of a step, whose executions are over.

        Returns:
            The time in which at least one was running, and what never ended.
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
    """Time in which nothing runs, by the innermost module that holds what runs before and behind.

    Attributes:
        times: Module path -> time, without that of the modules inside.
    """

    def __init__(self) -> None:
        self.times: dict[str, int] = {}
        self._since: int | None = None
        self._module = ""

    def begin(self, time: int, module: str | None) -> None:
        """The last execution ended, in a module; None for what is in the one before."""
        self._since = time
        if module is not None:
            self._module = module

    def end(self, time: int, module: str | None) -> None:
        """An execution begins; where another one is running, nothing comes to an end."""
        if self._since is not None:
            place = _around(self._module, self._module if module is None else module)
            self.times[place] = self.times.get(place, 0) + time - self._since
            self._since = None


@lru_cache(maxsize=4096)
def _around(one: str, other: str) -> str:
    """The innermost module that holds both."""
    others = with_parents(other)
    return next(path for path in reversed(with_parents(one)) if path in others)
