"""Programs that never run backward settle under each shipped tool: nothing is planned anew."""

# mypy: allow-untyped-calls

from __future__ import annotations

from typing import Any

import pytest
import torch
from every_tool import EDITING, TOOLS
from torch import nn
from torch.nn import functional as F

import amanda
from amanda_driver_torch.execution import execute, pending_hooks


class Network(nn.Module):
    """Operators that make one node or several, of one output or several, and that write."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.conv, self.lstm = nn.Conv1d(2, 2, 3, padding=1), nn.LSTM(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.norm(self.first(x))
        queries, keys = x.chunk(2, -1)
        scores = (queries @ keys.transpose(-1, -2)).softmax(-1)
        x = torch.cat([scores @ keys, keys], -1).view(2, 2, 8).contiguous()
        x = F.relu(self.conv(x), inplace=True)
        x[0] = x[1] * 2
        x[0].add_(torch.ones(8, device=x.device))
        x = F.scaled_dot_product_attention(x, x, x)
        largest, _ = x.max(-1)
        upper, lower = torch.tensor_split(x, 2, 1)
        sequence, _ = self.lstm(upper)
        return self.last(lower).sum() + largest.mean() + sequence.sum()


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("flops", "prune") else pytest.param(name, marks=pytest.mark.slow)
        for name in (*TOOLS, *EDITING)
    ],
)
def test_a_program_that_never_runs_backward_settles(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Any] = []

    def count(original: Any) -> Any:
        def counted(*args: Any) -> Any:
            plan = original(*args)
            planned.extend([] if plan is None else [plan])
            return plan

        return counted

    for module, function in ((execute, "compiled"), (pending_hooks, "later_hooks")):
        monkeypatch.setattr(module, function, count(getattr(module, function)))
    torch.manual_seed(0)
    model, x = Network(), torch.randn(2, 2, 8)
    with amanda.apply({**TOOLS, **EDITING}[name]()):
        for _ in range(10):
            planned.clear()
            model(x)
    assert planned == []
