"""Measure the cost of instrumentation by timing several ways to run a model side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from statistics import median
from time import perf_counter

import torch

#: A model, and a function that returns the context manager in which to run it.
Way = tuple[torch.nn.Module, Callable[[], AbstractContextManager[object]]]


def interleaved_medians(
    ways: Mapping[str, Way], batch: torch.Tensor, rounds: int = 10, repeats: int = 4
) -> dict[str, float]:
    """Return the median seconds of a forward pass for each way to run it.

    The ways take turns, so that all of them see the same changes in the speed of the machine, and
    so that plain runs also come after tools were applied and removed.

    Args:
        ways: What to time, by name.
        batch: Input of the model.
        rounds: Number of turns of each way.
        repeats: Number of timed runs in a turn, after one that is not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for _ in range(rounds):
            for name, (model, enter) in ways.items():
                with enter():
                    # Not timed: the first run may include analysis, which happens only once.
                    model(batch)
                    for _ in range(repeats):
                        start = perf_counter()
                        model(batch)
                        seconds[name].append(perf_counter() - start)
    return {name: median(times) for name, times in seconds.items()}
