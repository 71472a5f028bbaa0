"""Series of marks that are counted at once, against the same marks one by one."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate

from amanda_tools.latency.intervals import Between, Stack
from amanda_tools.latency.runs import PER_EXECUTION, Run, Runs

#: Modules of operators; None keeps that of the operator before.
MODULES = ["a", "a.b", "a.b.c", "a.d", "e", None]


def series(random_numbers: random.Random, count: int) -> list[int]:
    """Return marks of nested operators, each of which ends."""
    marks, running = list[int](), list[int]()
    for number in range(count):
        marks.append(2 * number)
        running.append(number)
        while running and random_numbers.random() < 0.6:
            marks.append(2 * running.pop() + 1)
    return [*marks, *(2 * number + 1 for number in reversed(running))]


def test_runs_count_what_single_executions_do() -> None:
    numbers_of = random.Random(0)
    for _ in range(50):
        count = numbers_of.randrange(1, 30)
        marks = series(numbers_of, count)
        modules = [numbers_of.choice(MODULES) for _ in range(count)]
        runs = Runs(marks, int, modules.__getitem__, "f")
        own, between, executions = Counter[int](), Counter[str](), list[int]()
        busy = 0
        for step in range(3):
            times = list(accumulate(numbers_of.randrange(1, 9) for _ in marks))
            stack, gaps = Stack[int](), Between()
            gaps.module = "f"
            for mark, time in zip(marks, times, strict=True):
                gaps.end(time, modules[mark >> 1])
                if not mark & 1:
                    stack.enter(mark >> 1, time)
                    continue
                interval = stack.leave(mark >> 1, time)
                assert interval is not None
                own[mark >> 1] += interval.total - interval.inner
                if not stack.open:
                    gaps.begin(time, modules[mark >> 1])
            between.update(gaps.times)
            run = Run(times, track=7, step=step)
            runs.add(run)
            busy += runs.busy(times)
            rows = list(zip(*[iter(runs.executions(run))] * PER_EXECUTION, strict=True))
            assert rows == [
                (n, 7, times[marks.index(2 * n)], times[marks.index(2 * n + 1)], step)
                for n in range(count)
            ]
            executions += [end - start for _, _, start, end, _ in rows]
        accounts, gap_times, added = runs.take()
        assert {what: time for what, _, time in accounts} == own
        assert sum(sum(totals) for _, totals, _ in accounts) == sum(executions)
        found = Counter[str]()
        for path, time in gap_times:
            found[path] += time
        assert +found == +between
        assert busy == sum(own.values())
        assert len(added) == 3
        assert runs.take() == ([], [], [])
