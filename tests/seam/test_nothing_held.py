"""While a shipped tool stays applied it keeps no tensor of a program that has let go of it."""

# mypy: allow-untyped-calls

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from every_tool import EDITING, TOOLS
from torch import nn
from torch.utils.checkpoint import checkpoint

import amanda


class Network(nn.Module):
    """A network whose layers are in a checkpoint inside a checkpoint, if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 3))

    def forward(self, x: torch.Tensor, use_reentrant: bool | None = None) -> Any:
        if use_reentrant is None:
            return self.last(self.first(x))

        def inner(hidden: torch.Tensor) -> Any:
            return checkpoint(self.last, self.first(hidden), use_reentrant=use_reentrant)

        return checkpoint(lambda x: inner(x) * 2, x, use_reentrant=use_reentrant)


MODEL = Network()


class Keeping(torch.autograd.Function):
    """Its output refers to its node, and the node to the output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.result = x * 2
        return ctx.result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


def cycle(backward: bool) -> list[torch.Tensor]:
    x = torch.ones(2, 3, requires_grad=True)
    hidden = MODEL(x)
    y = Keeping.apply(hidden)
    hidden.kept = y
    if backward:
        y.sum().backward()
    return [x, hidden, y]


def nested(use_reentrant: bool) -> list[torch.Tensor]:
    # A recomputation ends by an exception inside the operator that has made the last value needed.
    x = torch.ones(2, 3, requires_grad=True)
    y = MODEL(x, use_reentrant)
    y.sum().backward()
    return [x, y]


def interrupted() -> list[torch.Tensor]:
    # Outside modules, of which a tool might follow the ends.
    x = torch.ones(2, 3, requires_grad=True)
    with contextlib.suppress(RuntimeError):
        torch.add(x, torch.ones(4))
    y = checkpoint(lambda x: x.exp().exp(), x, use_reentrant=False)
    y.sum().backward()
    return [x, y]


PROGRAMS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "cycle": lambda: cycle(backward=True),
    "cycle without backward": lambda: cycle(backward=False),
    "operators that raise": interrupted,
    "nested checkpoints": lambda: nested(use_reentrant=False),
    "nested reentrant checkpoints": lambda: nested(use_reentrant=True),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "nonfinite" else pytest.param(name, marks=pytest.mark.slow)
        for name in (*TOOLS, *EDITING)
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_tool_holds_nothing(name: str) -> None:
    torch.manual_seed(0)
    held = {}
    for program, run in PROGRAMS.items():
        with amanda.apply({**TOOLS, **EDITING}[name]()):
            found = [weakref.ref(tensor) for _ in range(3) for tensor in run()]
            gc.collect()
            held[program] = sum(reference() is not None for reference in found)
    MODEL.zero_grad()
    assert held == dict.fromkeys(PROGRAMS, 0)
