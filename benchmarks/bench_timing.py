"""Times several ways to run one program, side by side in one process.

Owns how time is taken: turns, order, garbage collection, medians. Knows nothing of what it times.
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

#: Below this many seconds several runs are timed as one sample: the clock itself takes a part of
#: a microsecond.
SHORTEST_SAMPLE = 0.001
MOST_SAMPLES = 40
#: Runs at the begin of a turn that are not timed: the first ones after entering an extent may find
#: out what later ones know. Where they would take longer than so many seconds, one is not timed.
WARMING = 4
LONGEST_WARMING = 3.0


@dataclass(frozen=True)
class Way:
    """A way to run the program.

    Attributes:
        name: What it is called in the results.
        run: Runs the program once.
        enter: Makes the extent around the runs of one turn; entering it is not timed.
    """

    name: str
    run: Callable[[], object]
    enter: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Timing:
    """What one run takes in one way; times in seconds.

    Attributes:
        cpu: Median processor time of this process. All runs are synchronous, so that it is the
            elapsed time without what other programs of the machine took.
        wall: Median elapsed time.
        ratio: To the first way: the median of this way's turns to that of the turns that the first
            one had in the same rounds.
        low: First quartile of the ratios that the single rounds gave.
        high: Third quartile of them.
        first: Elapsed time of the very first run, in which tools analyse.
        turns: How often the way had its turn.
        runs: How many runs were timed.
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
    """The timings by name of the way, and why the ways that failed did."""

    timings: dict[str, Timing]
    failed: dict[str, str]


@dataclass
class _Record:
    way: Way
    first: float
    #: Runs before the timed ones.
    warming: int
    #: Runs in one sample, and samples in one turn.
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

    A machine that slows down or speeds up meanwhile does so for all of them. The first runs of a
    turn are not timed: they bring the turn's own code and data into the caches, and tools that are
    applied again look at each operator anew. The garbage collector runs between turns and not in
    them.

    Args:
        ways: What is timed; the first is what the others are compared with. One that raises in
            its first turn is left out and its error reported.
        seconds: For all; a way that has used its even share has no further turn, except for the
            first, which has one in every round.
        turn: Timed seconds of one turn, at the least one run.
        least: Turns that each way has in any case.

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
    # The same order in every run of the program.
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
    # The first way had a turn in every round; the others perhaps not.
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
