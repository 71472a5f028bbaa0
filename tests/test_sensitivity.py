"""`sensitivity`: its estimates equal those of gradients by hand, and rank as measuring does."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import amanda
from amanda_tools.sensitivity import Sensitivity


def quantized(value: Any, axes: Any) -> Any:
    scale = value.abs().amax(axes, keepdim=True) / 7
    return (value / scale).round().clamp(-7, 7) * scale


def test_damage_and_noise_are_those_computed_by_hand() -> None:
    torch.manual_seed(0)
    layer, tool, squares = torch.nn.Linear(6, 4), Sensitivity("int4", "int4"), []
    for _ in range(3):
        x = torch.randn(1, 6, requires_grad=True)
        with amanda.apply(tool):
            layer(x).square().sum().backward()
        w = layer.weight.detach().clone().requires_grad_()
        torch.autograd.backward(F.linear(x.detach(), w, layer.bias.detach()).square().sum())
        assert w.grad is not None
        assert x.grad is not None
        noise = quantized(w.detach(), 1) - w.detach(), quantized(x.detach(), (0, 1)) - x.detach()
        squares.append(float((noise[0] * w.grad).sum() + (noise[1] * x.grad).sum()) ** 2)
    (row,) = tool.result().ops
    assert row.damage == pytest.approx(sum(squares) / 6, rel=1e-4)
    assert (row.operands, row.executions, row.passes) == (2, 3, 3)
    signal = layer.weight.detach().square().sum()
    ratio = 10 * math.log10(float(signal / (quantized(w.detach(), 1) - w.detach()).square().sum()))
    assert row.sqnr is not None
    assert row.sqnr <= ratio + 1e-3


def test_pruning_is_ranked_by_the_weights_that_it_sets_to_zero() -> None:
    torch.manual_seed(0)
    layer, tool = torch.nn.Linear(6, 4), Sensitivity(sparsity=0.5)
    with amanda.apply(tool):
        layer(torch.ones(1, 6)).sum().backward()
    w = layer.weight.detach()
    smallest = w.flatten()[w.abs().flatten().argsort()[:12]].sum()
    (row,) = tool.result().ops
    assert row.damage == pytest.approx(float(smallest) ** 2 / 2, rel=1e-4)


def test_nothing_changes_and_without_gradients_noise_ranks() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    x, tool = torch.randn(2, 6), Sensitivity("int3", "int8")
    with torch.no_grad():
        wanted = model(x)
        with amanda.apply(tool):
            assert torch.equal(model(x), wanted)
    found = tool.result()
    ratios = [row.sqnr for row in found.ops]
    assert len(ratios) == 2
    assert None not in ratios
    assert ratios == sorted(ratios, key=lambda ratio: ratio or 0.0)
    assert "by noise of operands of weights in int3" in found.table().title
    assert json.loads(found.to_json())["format"] == "amanda.sensitivity/1"


@pytest.mark.parametrize("options", [{"weights": "int1"}, {"sparsity": 2.0}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"int1|sparsity"):
        Sensitivity(**options)
