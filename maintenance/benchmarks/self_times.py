"""Compare the self times that `latency` reports with the plain training step.

Prints, for each model of `bench_models`, medians of a step as processor times of the thread: plain,
and under the tool the self times, the tool itself, what the driver adds, and the rest. Each self
time is without one reading of that clock, which is a system call and takes ten times as long as the
tool's own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

import amanda
from amanda_tools.latency import Latency
from amanda_tools.latency.times import StepTime

from .bench_models import SUBJECTS

#: Steps under the tool before those that count: analysis, and steps without it.
WARM = 9


class OfThread(Latency):
    """Times by the clock of the thread, which does not run while other programs do."""

    now = staticmethod(time.thread_time_ns)


def timed(step: Callable[[], object], count: int) -> float:
    """Return the median of some steps in milliseconds."""
    times = []
    for _ in range(count):
        begin = time.thread_time_ns()
        step()
        times.append(time.thread_time_ns() - begin)
    return statistics.median(times) / 1e6


def reading() -> float:
    """Return the nanoseconds that one reading of the clock takes."""
    times = [time.thread_time_ns() for _ in range(1000)]
    return statistics.median(after - before for before, after in pairwise(times))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=7, help="in each turn")
    parser.add_argument("--turns", type=int, default=9, help="plain steps, then steps under it")
    parser.add_argument("--seconds", type=int, default=60, help="with more turns if needed")
    parser.add_argument("--only", nargs="+", help="the beginnings of names of models", default=[""])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for subject in SUBJECTS:
        if not subject.name.startswith(tuple(options.only)):
            continue
        step = subject.program(training=True)
        timed(step, 3)
        plain, readings = [timed(step, options.steps)], []
        turns: list[list[StepTime]] = []
        end = time.monotonic() + options.seconds
        while len(turns) < options.turns or time.monotonic() < end:
            tool = OfThread()
            with amanda.apply(tool):
                timed(step, WARM + options.steps)
            turns.append([one for one in tool.result().steps if one.number >= WARM])
            readings.append(reading())
            plain.append(timed(step, options.steps))
        print(f"{subject.name}: {told(plain, turns, statistics.median(readings))}", flush=True)


def told(plain: Sequence[float], turns: Sequence[Sequence[StepTime]], reading: float) -> str:
    """Return the medians of the turns; each is compared with the plain steps around it."""

    def median(part: Callable[[StepTime], float]) -> list[float]:
        return [statistics.median(map(part, steps)) / 1e6 for steps in turns]

    own = median(lambda step: step.ops - step.calls * reading)
    ratios = [2 * ops / sum(around) for ops, *around in zip(own, plain, plain[1:], strict=False)]
    parts = {
        "self times": own,
        "tool": median(lambda step: step.tool),
        "driver": median(lambda step: step.driver),
        "rest": median(lambda step: step.rest),
    }
    return (
        f"{len(turns)} turns, "
        f"plain {statistics.median(plain):.1f} ms ({min(plain):.1f} to {max(plain):.1f}), "
        + ", ".join(f"{name} {statistics.median(times):.1f}" for name, times in parts.items())
        + f"; self times over plain {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
