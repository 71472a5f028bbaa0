"""Measures what instrumentation costs: several ways to run a model, timed side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from statistics import median
from time import perf_counter

import torch

#: A model and what makes the context manager to run it in.
Way = tuple[torch.nn.Module, Callable[[], AbstractContextManager[object]]]


def interleaved_medians(
    ways: Mapping[str, Way], batch: torch.Tensor, rounds: int = 10, repeats: int = 4
) -> dict[str, float]:
    """Return for each way the median seconds of one forward run.

    The ways take turns, so that a machine that slows down or speeds up meanwhile does so for all
    of them, and so that the plain runs come after tools were applied and removed.

    Args:
        ways: by name, what is timed.
        batch: the model's input.
        rounds: how often each way has its turn.
        repeats: timed runs in a turn, after one that is not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for _ in range(rounds):
            for name, (model, enter) in ways.items():
                with enter():
                    # The first run may analyse, which is paid once and not at every execution.
                    model(batch)
                    for _ in range(repeats):
                        start = perf_counter()
                        model(batch)
                        seconds[name].append(perf_counter() - start)
    return {name: median(times) for name, times in seconds.items()}
