"""Accounts of series of marks: programs whose operators always run in the same order.

Such a program records all times of one run at once. What the run took counts at once, and the
operators inside when somebody reads them, since that takes as long as many of them take to run.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

__all__ = ["Inside", "Runs"]

T = TypeVar("T")


class Inside(Generic[T]):
    """One operator of a program.

    Attributes:
        what: The operator.
        start: Place of its start among the times of a run.
        end: Place of its end.
        inner: The operators directly inside.
    """

    def __init__(self, what: T, start: int) -> None:
        self.what, self.start, self.end = what, start, start
        self.inner: list[Inside[T]] = []


class Runs(Generic[T]):
    """Runs of one program.

    Args:
        numbers: Those of its marks: twice the number of the operator, and 1 more at its end.
        find: Returns the operator with a number.

    Attributes:
        operators: All operators that start and end, outer ones first.
        outermost: Those in no other.

    >>> runs = Runs((0, 2, 3, 1), "xy".__getitem__)
    >>> runs.add((10, 12, 17, 20), "main", 0)
    >>> [(what, totals, own) for what, totals, own in runs.take()[0]]
    [('x', [10], 5), ('y', [5], 5)]
    """

    def __init__(self, numbers: Sequence[int], find: Callable[[int], T]) -> None:
        self._per_run = len(numbers)
        self._times = array("q")
        self._places: list[tuple[str, int]] = []
        self.operators: list[Inside[T]] = []
        self.outermost: list[Inside[T]] = []
        running: list[Inside[T]] = []
        for place, number in enumerate(numbers):
            what = find(number >> 1)
            if not number & 1:
                running.append(Inside(what, place))
                self.operators.append(running[-1])
            elif running and running[-1].what is what:
                ended = running.pop()
                ended.end = place
                (running[-1].inner if running else self.outermost).append(ended)
        # Without an end, such as where a tool times only some operators, it is not timed.
        self.operators = [one for one in self.operators if one.end > one.start]

    def __len__(self) -> int:
        return len(self._times)

    def add(self, times: Sequence[int], track: str, step: int) -> None:
        """Add a run."""
        self._times.extend(times)
        self._places.append((track, step))

    def take(self) -> tuple[list[tuple[T, list[int], int]], Iterator[tuple[T, str, int, int, int]]]:
        """Return the runs since the last call, and forget them.

        Returns:
            For each operator the times of its executions, and the sum of these without what was
            inside; and each execution: operator, track, start, end, step.
        """
        times, places, size = self._times, self._places, self._per_run
        self._times, self._places = array("q"), []
        if not places:
            return [], iter(())
        totals = {
            id(one): [b - a for a, b in zip(times[one.start :: size], times[one.end :: size])]  # noqa: B905  The same length.
            for one in self.operators
        }
        sums = {key: sum(found) for key, found in totals.items()}
        accounts = [
            (one.what, totals[id(one)], sums[id(one)] - sum(sums[id(i)] for i in one.inner))
            for one in self.operators
        ]
        executions = (
            (one.what, track, times[at + one.start], times[at + one.end], step)
            for at, (track, step) in zip(range(0, len(times), size), places, strict=True)
            for one in self.operators
        )
        return accounts, executions
