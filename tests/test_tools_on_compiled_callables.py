"""Tools name the compiled callables that ran eagerly while they were applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_tools.flops import Flops
from amanda_tools.graph import GraphTracing
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory

pytestmark = pytest.mark.filterwarnings("ignore:Compiled callables run eagerly")

NOTE = "compiled callables ran eagerly: these are the operators of the eager program"


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))


def notes(make: Callable[[], Any], *calls: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    tool, x = make(), torch.ones(2, 8)
    with amanda.apply(tool):
        for call in calls:
            call(x).sum().backward()  # type: ignore[no-untyped-call]
    found: list[str] = tool.result().notes
    return found


@pytest.mark.parametrize("make", [Latency, Memory, Flops, GraphTracing])
def test_they_say_that_it_ran_eagerly(make: Callable[[], Any]) -> None:
    compiled = torch.compile(network(), backend="eager")
    assert NOTE in notes(make, compiled)
    assert NOTE in notes(make, network(), compiled)
    assert NOTE not in notes(make, network())


def test_only_operators_of_compiled_callables_are_marked() -> None:
    marked: dict[str, bool] = {}

    class Marks(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.analyse, backward=False)
            self.add_inst_for_op(lambda context: None, backward=True)

        def analyse(self, context: amanda.OpContext) -> None:
            marked[context.op_type] = context.get("not_compiled", False)

    compiled = torch.compile(lambda x: torch.tanh(x), backend="eager")
    with amanda.apply(Marks()):
        x = torch.ones(2).exp()
        torch.sin(compiled(x))
    assert marked == {"exp": False, "tanh": True, "sin": False, "ones": False}
