"""The figures that limits of `amanda run` may be about: declared, in results, and documented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_tools.flops import Flops
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory
from amanda_tools.nonfinite import NonFinite
from amanda_tools.summary import Summary

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "running.md"
TOOLS: dict[str, Any] = {
    "flops": Flops,
    "latency": Latency,
    "memory": Memory,
    "nonfinite": NonFinite,
    "summary": Summary,
}


def test_the_guide_lists_the_figures() -> None:
    section = GUIDE.read_text().partition("### As a check")[2].partition("###")[0]
    for name, tool in TOOLS.items():
        row = re.search(rf"^\| `{name}` \|.*$", section, re.MULTILINE)
        assert row is not None
        assert re.findall(rf"`{name}\.(\w+)`", row[0]) == list(tool.figures)


@pytest.mark.parametrize("name", TOOLS)
def test_results_have_the_declared_figures(name: str) -> None:
    tool = TOOLS[name]()
    empty = tool.result().figures()
    assert empty.keys() <= tool.figures.keys()
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amanda.apply(tool):
        for _ in range(3):
            (model(torch.full((2, 4), float("inf"))) * 0).sum().backward()
            optimizer.step()
    figures = tool.result().figures()
    assert figures.keys() == tool.figures.keys()
    assert all(value is not None and value >= 0 for value in figures.values())
    expected = {
        "flops": {"total": 2 * 3 * (24 + 24), "macs": 3 * 24, "not_counted": 0},
        "nonfinite": {"count": len(tool.result().faults) if name == "nonfinite" else 0},
        "summary": {"parameters": 15, "macs": 24},
    }
    assert expected.get(name, {}).items() <= figures.items()
