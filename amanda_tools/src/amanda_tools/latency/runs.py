"""Accounts of series of marks: programs whose operators always run in the same order.

All times of one run come at once. What the run took counts at once, and the operators inside when
somebody reads them, since that takes as long as many of them take to run.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

from amanda_tools.latency.intervals import around

__all__ = ["PER_EXECUTION", "Inside", "Run", "Runs"]

T = TypeVar("T")

#: Numbers of one execution: operator, track, start, end, step.
PER_EXECUTION = 5


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


class Run(NamedTuple):
    """One run of a program.

    Attributes:
        times: The times of its marks.
        track: Number of its track in the trace file.
        step: Number of the step.
    """

    times: Sequence[int]
    track: int
    step: int


class Runs(Generic[T]):
    """Runs of one program.

    Args:
        numbers: Those of its marks: twice the number of the operator, and 1 more at its end.
        find: Returns the operator with a number.
        module_of: Returns the module of an operator; None keeps that of the one before.
        module: The module of the operator before the program; None if what is between its operators
            does not count.

    Attributes:
        operators: All operators that start and end, outer ones first.
        outermost: Those in no other.
        gaps: Between these: the path of the innermost module around both, and the places of the
            times of the end and of the start.
        module: The module of the last of these.

    >>> runs = Runs((0, 2, 3, 1), "xy".__getitem__)
    >>> runs.add(Run((10, 12, 17, 20), track=0, step=0))
    >>> accounts, gaps, added = runs.take()
    >>> accounts
    [('x', [10], 5), ('y', [5], 5)]
    """

    def __init__(
        self,
        numbers: Sequence[int],
        find: Callable[[int], T],
        module_of: Callable[[T], str | None] = lambda what: None,
        module: str | None = None,
    ) -> None:
        self._per_run = len(numbers)
        self._added: list[Run] = []
        operators: list[Inside[T]] = []
        self.outermost: list[Inside[T]] = []
        running: list[Inside[T]] = []
        for place, number in enumerate(numbers):
            what = find(number >> 1)
            if not number & 1:
                running.append(Inside(what, place))
                operators.append(running[-1])
            elif running and running[-1].what is what:
                ended = running.pop()
                ended.end = place
                (running[-1].inner if running else self.outermost).append(ended)
        # Without an end, such as where a tool times only some operators, it is not timed.
        self.operators = [one for one in operators if one.end > one.start]
        self.gaps: list[tuple[str, int, int]] = []
        modules = [module_of(one.what) for one in self.outermost]
        pairs = zip(pairwise(self.outermost), pairwise(modules), strict=True)
        for (one, other), (before, after) in pairs if module is not None else ():
            module = module if before is None else before
            path = around(module, module if after is None else after)
            self.gaps.append((path, one.end, other.start))
        self.module = next((found for found in reversed(modules) if found is not None), None)
        #: The numbers of the executions of one run, without its track, times and step.
        self._executions = array("q")
        for one in self.operators:
            self._executions.extend((numbers[one.start] >> 1, 0, 0, 0, 0))

    def __len__(self) -> int:
        return self._per_run * len(self._added)

    def add(self, run: Run) -> None:
        """Add a run."""
        self._added.append(run)

    def busy(self, times: Sequence[int]) -> int:
        """Return how long operators were running in a run."""
        # In lists: a call of a generator for each operator takes as long as all else.
        ends = [times[one.end] for one in self.outermost]
        return sum(ends) - sum([times[one.start] for one in self.outermost])

    def executions(self, run: Run) -> array[int]:
        """Return the numbers of each execution in a run, one after the other."""
        found, count = self._executions[:], len(self.operators)
        found[1::PER_EXECUTION] = array("q", (run.track,)) * count
        found[2::PER_EXECUTION] = array("q", [run.times[one.start] for one in self.operators])
        found[3::PER_EXECUTION] = array("q", [run.times[one.end] for one in self.operators])
        found[4::PER_EXECUTION] = array("q", (run.step,)) * count
        return found

    def take(self) -> tuple[list[tuple[T, list[int], int]], list[tuple[str, int]], list[Run]]:
        """Return the runs since the last call, and forget them.

        Returns:
            For each operator the times of its executions, and the sum of these without what was
            inside; the times between operators, by the path of a module; and the runs.
        """
        added, self._added = self._added, []
        if not added:
            return [], [], []
        times, size = array("q"), self._per_run
        for run in added:
            times.extend(run.times)
        columns = [times[place::size] for place in range(size)]
        totals = {
            id(one): [b - a for a, b in zip(columns[one.start], columns[one.end], strict=True)]
            for one in self.operators
        }
        sums = {key: sum(found) for key, found in totals.items()}
        accounts = [
            (one.what, totals[id(one)], sums[id(one)] - sum([sums[id(i)] for i in one.inner]))
            for one in self.operators
        ]
        gaps = [(path, sum(columns[end]) - sum(columns[begin])) for path, begin, end in self.gaps]
        return accounts, gaps, added
