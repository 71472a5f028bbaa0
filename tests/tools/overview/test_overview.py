"""The overview of `amanda run` without a tool: which tools it needs, and what it says of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import amanda
from amanda_core.config import factories
from amanda_core.results import share
from amanda_tools.flops import Flops
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory
from amanda_tools.overview import OVERVIEW
from amanda_tools.summary import Summary


def train(*tools: amanda.Tool, steps: int = 5) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amanda.apply(*tools):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()


def test_the_tools_are_installed_under_these_names() -> None:
    made = [factories.factory(name) for name in OVERVIEW.tools]
    assert made == [Summary, Latency, Memory, Flops]


def test_at_most_nine_lines_answer_where_time_memory_and_compute_are() -> None:
    tools: list[Any] = [Summary(), Latency(), Memory(), Flops()]
    train(*tools)
    results: dict[str, Any] = {
        name: t.result() for name, t in zip(OVERVIEW.tools, tools, strict=True)
    }
    share(results)
    lines = list(OVERVIEW.lines(results))
    assert len(lines) <= 9
    model, *_, macs = lines
    assert model == ("model: Sequential: 4 modules, 58 parameters, 144 MACs in one forward pass")
    assert macs.startswith("MACs: linear 100.0%; by layer ")
    # Forward 5 * 144. The gradient of the input of the first layer is not computed.
    assert (
        "compute: a forward pass of Sequential (each of 5): 144 MACs for a batch of 3, 48 MACs for "
        "one sample; a step (each of 5): 144 MACs forward and 192 MACs backward; in all 1.680 kMACs"
    ) in lines
    starts = [line.partition(":")[0] for line in lines]
    assert starts[1:3] == ["time", "time in operators"]
    assert "these tools included" in lines[1]
    peak = sum(results["memory"].kinds_at_peak.values())
    assert f"memory: {peak} B at the peak" in next(x for x in lines if x.startswith("memory:"))


def test_what_did_not_run_or_is_not_known_is_not_said() -> None:
    tools: list[Any] = [Summary(), Latency(), Memory(), Flops()]
    results: dict[str, Any] = {
        name: t.result() for name, t in zip(OVERVIEW.tools, tools, strict=True)
    }
    assert list(OVERVIEW.lines(results)) == [
        "memory: 0 B at the peak",
        "compute: in all 0 MACs",
    ]
    assert list(OVERVIEW.lines({})) == []
