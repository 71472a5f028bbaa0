"""Programs that make their weights again at each call get the edits of those that keep them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import amanda
from amanda_tools.faults import InjectFaults
from amanda_tools.prune import Prune, PruneNM, PruneTiles
from amanda_tools.quantize import Quantize

CALLS = 4
Program = Callable[[torch.Tensor], torch.Tensor]
Make = Callable[[torch.Tensor], torch.Tensor]
TOOLS: dict[str, Callable[[], Any]] = {
    "prune": lambda: Prune(0.5),
    "prune_nm": lambda: PruneNM(2, 4),
    "prune_tiles": lambda: PruneTiles(0.5, tile=4),
    "quantize": Quantize,
    "inject_faults": lambda: InjectFaults(site="weight", rate=0.05),
}


def values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, 16, generator=generator) for _ in range(2)]


def outside_of_modules(make: Make, again: bool) -> Program:
    kept = [make(value) for value in values()]

    def program(x: torch.Tensor) -> torch.Tensor:
        for weight in [make(value) for value in values()] if again else kept:
            x = linear(x, weight)
        return x

    return program


def in_a_module(make: Make, again: bool) -> Program:
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in values()])
    model.load_state_dict({f"{i}.weight": value for i, value in enumerate(values())})

    def program(x: torch.Tensor) -> torch.Tensor:
        made = {f"{i}.weight": make(value) for i, value in enumerate(values() if again else ())}
        y: torch.Tensor = torch.func.functional_call(model, made, (x,))
        return y

    return program


PROGRAMS: dict[str, tuple[Callable[[Make, bool], Program], Make]] = {
    f"{where}, {kind}": (how, make)
    for where, how in {
        "outside of modules": outside_of_modules,
        "in a module": in_a_module,
    }.items()
    for kind, make in {
        "parameters": lambda value: nn.Parameter(value.clone()),
        "leaves": lambda value: value.clone().requires_grad_(),
    }.items()
}


def outputs(tool: amanda.Tool, program: Program) -> list[torch.Tensor]:
    with amanda.apply(tool):
        return [program(torch.ones(3, 16)).detach() for _ in range(CALLS)]


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_call_gets_the_edits_of_the_first(name: str, program: str) -> None:
    where, make = PROGRAMS[program]
    tools = [TOOLS[name](), TOOLS[name]()]
    again = outputs(tools[0], where(make, True))
    kept = outputs(tools[1], where(make, False))
    for one, other in zip(again, kept, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    # The kept weights are edited, so that equal outputs mean edits.
    plain = where(make, False)(torch.ones(3, 16)).detach()
    waits = name == "prune_tiles" and where is outside_of_modules  # For the end of a step.
    assert torch.equal(kept[-1], plain) is waits
    results = [tool.result() for tool in tools]
    if name != "inject_faults":
        assert [len(result.weights) for result in results] == [2, 2]
    assert [result.reached for result in results] == [2 * 16 * 16] * 2
