"""Results of two processes that do the same: counts are added, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from every_tool import EDITING, TOOLS
from torch import nn

import amanda
from amanda_core.processes.merging import merge
from amanda_tools.prune import Prune
from amanda_tools.quantize import Quantize

EVERY: dict[str, Callable[[], Any]] = {
    **TOOLS,
    **EDITING,
    "prune, half": lambda: Prune(0.5),
    "quantize, static": lambda: Quantize(calibration=1),
}
#: What each process does or makes itself.
COUNTED = {
    *("calls", "backward_calls", "executions", "values", "times", "samples", "steps", "passes"),
    *("macs", "own_macs", "effective_macs", "flops", "backward_macs", "backward_flops", "moved"),
    *("by_both", "by_input", "by_weight", "elements", "zeros", "small", "blocks", "zero_blocks"),
    *("groups", "compliant", "zero_channels", "allocated", "building", "buffers", "made", "saved"),
    *("gradients", "evicted", "repeated", "checked", "passed_on", "skipped", "ops", "unwritten"),
    *("faults", "seen", "changed", "allowed"),
}
#: Rows of each process about itself: events, and values that it has kept.
OWN = {"values", "tensors", "samples", "graphs", "faults", "gradients"}
#: Figures of weights, which are not more because two processes read them.
OF_WEIGHTS = {"prune, half": {"elements", "pruned", "read", "parameters", "reached"}}


def program() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.ones(2, 1, 4, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    (model(torch.ones(2, 1, 4, 4)) / torch.zeros(())).sum()


def changed(one: Any, two: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each field that differs, and its two values."""
    if isinstance(one, dict):
        for key, value in one.items():
            if key != "charts":
                yield from changed(value, two[key], key)
    elif isinstance(one, list) and one and isinstance(one[0], dict) and len(one) == len(two):
        for mine, its in zip(one, two, strict=True):
            yield from changed(mine, its, name)
    elif one != two:
        yield name, one, two


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EVERY)
def test_only_counts_are_added(name: str) -> None:
    tool = EVERY[name]()
    with amanda.apply(tool):
        program()
    of_one = json.loads(tool.result().to_json())
    of_two = merge(["rank0", "rank1"], lambda process: of_one)
    fields = set()
    for field, one, two in changed(of_one, of_two):
        fields.add(field)
        if isinstance(one, list):
            assert field in OWN, field
            ranks = ["rank0"] * len(one) + ["rank1"] * len(one)
            assert [row.pop("process") for row in two] == ranks
            assert two == one * 2
        else:
            assert field in COUNTED, field
            assert two == 2 * one
    assert fields.isdisjoint(OF_WEIGHTS.get(name, ()))
    known = {*of_one, *(field for row in of_one.get("weights") or () for field in row)}
    assert OF_WEIGHTS.get(name, set()) <= known
