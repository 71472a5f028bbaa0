"""Tensors can swap their contents under every tool and afterwards."""

# mypy: allow-untyped-calls

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from every_tool import EDITING, TOOLS
from torch import nn

import amanda

X = torch.randn(4, 2, 8, 8)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 2)
    )


def train(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    loss = net(x).square().sum()
    loss.backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    net.zero_grad()
    return [p.detach().clone() for p in net.parameters()]


@pytest.fixture(autouse=True)
def _swapping_conversions() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOLS | EDITING)
def test_conversions_during_and_after(name: str) -> None:
    def program(net: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(0)
        found = train(net, X)
        found += train(net.double(), X.double())
        return found + train(net.float(), X)

    torch.manual_seed(1)
    net = network()
    state = {key: value.clone() for key, value in net.state_dict().items()}
    expected = program(net)
    tool = (TOOLS | EDITING)[name]()
    net = network()
    net.load_state_dict(state)
    with amanda.apply(tool):
        got = program(net)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    gc.collect()
    assert [n for n, p in net.named_parameters() if weakref.getweakrefs(p)] == []
    train(net.double(), X.double())
    net.float()
    with amanda.apply(tool):
        train(net, X)
    net.double()
