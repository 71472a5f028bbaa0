"""Time several ways to run one program, side by side in one process.

Takes turns, shuffles the order, controls garbage collection and computes medians. Independent of
what is timed.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import perf_counter, process_time

__all__ = ["Comparison", "Timing", "Way", "interleaved"]

#: Runs shorter than this many seconds are timed several at a time, because reading the clock takes
#: a part of a microsecond.
SHORTEST_SAMPLE = 0.001
MOST_SAMPLES = 40
#: Number of runs at the start of a turn that are not timed, because the first ones may analyse. If
#: they would take longer than LONGEST_WARMING seconds, only one is left out.
WARMING = 4
LONGEST_WARMING = 3.0


@dataclass(frozen=True)
class Way:
    """A way to run the program.

    Attributes:
        name: Name in the results.
        run: Runs the program once.
        enter: Returns the context manager for the runs of one turn; entering it is not timed.
    """

    name: str
    run: Callable[[], object]
    enter: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Timing:
    """Duration of one run in one way, in seconds.

    Attributes:
        cpu: Median processor time of this process. All runs are synchronous, so this is the elapsed
            time without the time of other programs on the machine.
        wall: Median elapsed time.
        ratio: Median of this way's turns divided by the median of the first way's turns in the same
            rounds.
        low: First quartile of the ratios of the single rounds.
        high: Third quartile of these ratios.
        first: Elapsed time of the very first run, in which tools analyse.
        turns: Number of turns.
        runs: Number of timed runs.
    """

    cpu: float
    wall: float
    ratio: float
    low: float
    high: float
    first: float
    turns: int
    runs: int


@dataclass(frozen=True)
class Comparison:
    """Timings by the name of the way, and the errors of ways that failed."""

    timings: dict[str, Timing]
    failed: dict[str, str]


@dataclass
class _Record:
    way: Way
    first: float
    #: Number of runs before the timed ones.
    warming: int
    #: Number of runs in a sample, and of samples in a turn.
    inner: int
    samples: int
    spent: float = 0.0
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    #: Round -> median processor time of its turn.
    turns: dict[int, float] = field(default_factory=dict)


def interleaved(
    ways: Sequence[Way], seconds: float, *, turn: float = 0.05, least: int = 3
) -> Comparison:
    """Time the ways in turns, in an order that is shuffled in every round.

    All ways see the same changes in the speed of the machine. The first runs of a turn are not
    timed: they load the caches, and tools that are applied again analyse each operator again. The
    garbage collector runs between turns and not during them.

    Args:
        ways: The ways to time; the others are compared with the first. A way that raises in its
            first turn is left out, and its error is reported.
        seconds: Time for all ways. A way that has used its even share gets no further turn, except
            for the first way, which has a turn in every round.
        turn: Timed seconds of one turn; at least one run.
        least: Minimum number of turns of each way.

    Raises:
        RuntimeError: The first way failed.
    """
    records: list[_Record] = []
    failed: dict[str, str] = {}
    for way in ways:
        try:
            records.append(_calibrate(way, turn))
        except Exception as error:  # A peer that cannot run a model is a result.
            failed[way.name] = f"{type(error).__name__}: {error}".splitlines()[0]
    if not records or records[0].way is not ways[0]:
        raise RuntimeError(f"{ways[0].name} failed: {failed[ways[0].name]}")
    share = seconds / len(ways)
    # The same shuffles in every run of the benchmark.
    order = random.Random(0)
    for number in range(1_000_000):
        waiting = [r for r in records[1:] if len(r.turns) < least or r.spent < share]
        if not waiting and number >= least:
            break
        waiting.append(records[0])
        order.shuffle(waiting)
        for record in waiting:
            _take_turn(record, number)
    base = records[0]
    return Comparison({r.way.name: _summary(r, base) for r in records}, failed)


def _calibrate(way: Way, turn: float) -> _Record:
    begin = perf_counter()
    with way.enter():
        start = perf_counter()
        way.run()
        first = perf_counter() - start
        start = perf_counter()
        way.run()
        once = max(perf_counter() - start, 1e-7)
    inner = max(1, round(SHORTEST_SAMPLE / once))
    samples = min(MOST_SAMPLES, max(1, round(turn / (once * inner))))
    warming = WARMING if WARMING * once <= LONGEST_WARMING else 1
    return _Record(way, first, warming, inner, samples, spent=perf_counter() - begin)


def _take_turn(record: _Record, number: int) -> None:
    run, inner = record.way.run, record.inner
    begin = perf_counter()
    cpu: list[float] = []
    with record.way.enter():
        for _ in range(record.warming):
            run()
        gc.collect()
        gc.disable()
        try:
            for _ in range(record.samples):
                cpu_start, wall_start = process_time(), perf_counter()
                for _ in range(inner):
                    run()
                cpu_end, wall_end = process_time(), perf_counter()
                cpu.append((cpu_end - cpu_start) / inner)
                record.wall.append((wall_end - wall_start) / inner)
        finally:
            gc.enable()
    record.cpu.extend(cpu)
    record.turns[number] = median(cpu)
    record.spent += perf_counter() - begin


def _summary(record: _Record, base: _Record) -> Timing:
    own = record.turns
    # Unlike the first way, the others may not have had a turn in every round.
    beside = {number: base.turns[number] for number in own}
    ratios = [own[number] / beside[number] for number in own]
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Timing(
        cpu=median(record.cpu),
        wall=median(record.wall),
        ratio=median(own.values()) / median(beside.values()),
        low=low,
        high=high,
        first=record.first,
        turns=len(own),
        runs=len(record.cpu) * record.inner,
    )
