"""Results that are read while a program runs, as `amanda run` does, do not change later ones."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from every_tool import EDITING, TOOLS
from torch import nn

import amanda
from amanda_core.cli import turns
from amanda_tools.latency import Latency

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]

#: Fields that differ from run to run: times, and the file of a tensor of a dump.
_TIMES = (
    *("second", "time", "self", "total", "wall", "first", "longest", "shortest", "median"),
    *("moment", "file"),
)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = model(torch.full((4, 8), 0.1 * step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(make: Callable[[], Any], reads: bool) -> tuple[list[float], Any, int]:
    """Train under a tool; return losses, the result's counts, and how often it was read before."""
    # Memory that is not initialised differs from run to run, so it is not part of it.
    tool, model, stop, read = make(), network(), threading.Event(), 0

    def look() -> None:
        nonlocal read
        with amanda.disabled():
            while not stop.wait(0.002):
                with turns.held([tool], 5) as held:
                    if held:
                        tool.result().to_json()
                        read += 1

    failures: list[BaseException] = []

    def looking() -> None:
        try:
            look()
        except BaseException as error:
            failures.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amanda.AmandaWarning)
        with amanda.apply(tool, threads="all"):
            turns.share([tool])
            thread = threading.Thread(target=looking)
            if reads:
                thread.start()
            losses = train(model, 30)
            stop.set()
            if reads:
                thread.join()
        result = json.loads(tool.result().to_json())
    assert not failures, failures
    return losses, counts(result), read


def counts(value: Any) -> Any:
    """Return what of a result is the same in each run."""
    if isinstance(value, dict):
        return {
            name: counts(one)
            for name, one in value.items()
            if not any(word in name for word in _TIMES) and name != "charts"
        }
    return [counts(one) for one in value] if isinstance(value, list) else value


def test_latency_without_kernels() -> None:
    """It looks at some steps without timing them, so the executions are not all."""
    timed = []
    for reads in (False, True):
        _, result, read = run(lambda: Latency(warmup=0), reads)
        assert (read > 0) == reads
        timed.append([(op["name"], op["calls"], op["unfinished"]) for op in result["ops"]])
        assert result["notes"] == []
    assert timed[0] == timed[1]


@pytest.mark.parametrize("name", [*TOOLS, *EDITING])
def test_reading_a_result_changes_neither_the_program_nor_later_results(name: str) -> None:
    make: Any = {**TOOLS, **EDITING}[name]
    if getattr(make(), "result_is_final", False):
        pytest.skip("its result is read at the end only")
    losses, expected, _ = run(make, reads=False)
    found, result, read = run(make, reads=True)
    assert found == losses
    assert read > 0
    assert result == expected
