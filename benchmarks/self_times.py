"""Compare the self times that `latency` reports with the plain training step.

Prints, for each model of `bench_models`, medians of a step as processor times of the thread: plain,
and under the tool the self times, the tool itself, what the driver adds, and the rest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import amanda
from amanda_tools.latency import Latency
from amanda_tools.latency.times import StepTime
from bench_models import SUBJECTS

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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="+", help="the beginnings of names of models", default=[""])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for subject in SUBJECTS:
        if not subject.name.startswith(tuple(options.only)):
            continue
        step = subject.program(training=True)
        timed(step, 3)
        before, tool = timed(step, options.steps), OfThread()
        with amanda.apply(tool):
            timed(step, WARM + options.steps)
        after, found = timed(step, options.steps), tool.result()
        steps = [one for one in found.steps if one.number >= WARM]

        def median(part: Callable[[StepTime], int], steps: list[StepTime] = steps) -> float:
            return statistics.median(map(part, steps)) / 1e6

        own = median(lambda one: one.ops)
        print(
            f"{subject.name}: plain {before:.1f} and {after:.1f} ms, self times {own:.1f} ms "
            f"({own / statistics.mean((before, after)):.2f}), tool {median(lambda s: s.tool):.1f}, "
            f"driver {median(lambda s: s.driver):.1f}, rest {median(lambda s: s.rest):.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
