"""Costs grow at most with the number of new things: counted, not timed.

Each program is run at two sizes, the first and the second time under a tool. The lines of Python
that run, loops included, may grow as the size does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from every_tool import EDITING, TOOLS
from torch import nn

import amanda
from amanda_core.driver_kit import Labels, Parameters
from amanda_driver_torch.identity.rules import LAYOUTS, new_scopes
from amanda_tools.prune import Prune
from amanda_tools.quantize import Quantize

Program = Callable[[], object]
Make = Callable[[], amanda.Tool]


def parameters_of_a_step(size: int) -> Program:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(size)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    return torch.optim.AdamW(parameters).step


def tensors_of_a_foreach_step(size: int) -> Program:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(size)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    return torch.optim.AdamW(parameters, foreach=True).step


def operands(size: int) -> Program:
    leaves = [torch.ones(2, requires_grad=True) for _ in range(size)]
    return lambda: torch.cat(leaves).sum().backward()  # type: ignore[no-untyped-call]


@torch.no_grad()
def rotations(size: int) -> Iterator[nn.Linear]:
    """Yield layers through which values neither grow nor vanish: zeros may take longer to count."""
    for _ in range(size):
        layer = nn.Linear(2, 2)
        layer.weight.copy_(torch.tensor([[0.6, 0.8], [-0.8, 0.6]]))
        yield layer


def modules_of_a_model(size: int) -> Program:
    model = nn.Sequential(*rotations(size))
    x = torch.ones(1, 2)
    return lambda: model(x).sum().backward()


def modules_without_gradients(size: int) -> Program:
    model, x = nn.Sequential(*rotations(size)), torch.ones(1, 2)
    return torch.no_grad()(lambda: model(x))


def modules_in_a_list(size: int) -> Program:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [[*rotations(size)]]  # Not registered.

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers[0]:
                x = layer(x)
            return x

    model, x = Stack(), torch.ones(1, 2)
    return lambda: model(x).sum().backward()


def models(size: int) -> Program:
    layers = [*rotations(size)]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    x = torch.ones(1, 2)

    def step() -> None:
        out = x
        for layer in layers:
            out = layer(out)
        out.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def operators(size: int) -> Program:
    source = "def run(x):\n" + "    x = x + 1\n" * size + "    x.sum().backward()\n"
    space: dict[str, Any] = {}
    exec(compile(source, "operators.py", "exec"), space)
    x = torch.ones(2, requires_grad=True)
    return lambda: space["run"](x)


def values_in_a_list(size: int) -> Program:
    x = torch.ones(2, requires_grad=True)

    def run() -> None:
        values = [x]
        for _ in range(size):
            values.append(values[-1].sigmoid())
        values[-1].sum().backward()  # type: ignore[no-untyped-call]

    return run


class Raw(amanda.Tool):
    """Looks at all forward and raw backward operators."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(lambda context: context.insert_after_op(lambda *_: None))
        self.add_inst_for_op(
            lambda context: context.insert_before_backward_op(lambda *_: None), backward=True
        )


PROGRAMS = [
    parameters_of_a_step,
    tensors_of_a_foreach_step,
    operands,
    modules_of_a_model,
    modules_without_gradients,
    modules_in_a_list,
    models,
    operators,
    values_in_a_list,
]
ALL: dict[str, Make] = {
    "raw": Raw,
    **TOOLS,
    **EDITING,
    "prune": lambda: Prune(0.5),
    "quantize": lambda: Quantize(),
}
#: Tool -> program -> why what it does for each thing grows with the program.
WITH_ALL: dict[str, dict[Callable[[int], Program], str]] = {
    "rematerialize everything": dict.fromkeys(
        [modules_of_a_model, modules_in_a_list, models, values_in_a_list],
        "a value is computed from all that were evicted before it",
    ),
}
#: Run with the fast tests: the tool, the program and two sizes.
SAMPLE = [
    *((name, make, 20, 100) for name in ("raw", "flops") for make in PROGRAMS),
    ("prune", modules_of_a_model, 20, 100),
    ("quantize", modules_of_a_model, 20, 100),
    *(
        (name, make, 20, 100)
        for name in ("capture", "effective_path", "graph", "rematerialize")
        for make in (modules_of_a_model, modules_without_gradients, models)
    ),
    ("raw", operators, 100, 1_000),
    ("rematerialize", values_in_a_list, 100, 1_000),
    *((name, operands, 100, 1_000) for name in ("raw", "flops", "graph")),
    *((name, tensors_of_a_foreach_step, 100, 1_000) for name in ("raw", "flops", "latency")),
]
#: Those of which 100,000 things take minutes and not hours, each line counted.
LARGE = [
    (name, make)
    for name in ("raw", "flops", "fingerprint", "latency")
    for make in (operands, tensors_of_a_foreach_step)
]


def lines_of(program: Program) -> int:
    count = 0

    def trace(*_: object) -> Any:
        nonlocal count
        count += 1
        return trace

    sys.settrace(trace)
    try:
        program()
    finally:
        sys.settrace(None)
    return count


def lines(make: Callable[[int], Program], tool: Make, size: int) -> list[int]:
    """Return the lines of the first and the second run."""
    program = make(size)
    program()
    with amanda.apply(tool()):
        return [lines_of(program) for _ in range(2)]


def check(make: Callable[[int], Program], tool: Make, small: int, large: int) -> None:
    lines(make, tool, 10)  # Imports and caches.
    for few, many in zip(lines(make, tool, small), lines(make, tool, large), strict=True):
        assert many < 1.1 * few * large / small


@pytest.mark.parametrize(("tool", "make", "small", "large"), SAMPLE)
def test_costs_are_linear(
    tool: str, make: Callable[[int], Program], small: int, large: int
) -> None:
    check(make, ALL[tool], small, large)


def test_a_parameter_outside_of_models_is_found_at_once_among_many() -> None:
    def cost(size: int) -> int:
        labels, tensors = Labels(), [torch.ones(1) for _ in range(size)]
        tokens = [labels.look_up(tensor)[0] for tensor in tensors]
        assert labels.tensor(tokens[-1]) is tensors[-1]
        return lines_of(lambda: labels.tensor(tokens[-1]))

    assert cost(100) == cost(1)


def test_a_parameter_is_found_at_once_among_many_models() -> None:
    def cost(size: int) -> int:
        layers = [nn.Linear(2, 2) for _ in range(size)]
        scopes, labels = new_scopes(), Labels()
        parameters = Parameters(scopes, labels, LAYOUTS)
        for layer in layers:
            parameters.find(layer.weight, scopes.enter(layer, None, False).root)
        found = parameters.find(layers[-1].weight, "")
        assert found is not None
        assert found.path.endswith("weight")
        return lines_of(lambda: parameters.find(layers[-1].weight, ""))

    cost(1)
    assert cost(100) == cost(1)


def test_a_module_is_named_at_once_among_many() -> None:
    class Listing(nn.Module):
        pass

    def cost(size: int, *, inside: bool) -> int:
        scopes, top = new_scopes(), Listing()
        layers = [nn.Linear(2, 2) for _ in range(size)]
        around = scopes.enter(top, None, False) if inside else None
        for layer in layers[:-1]:
            scopes.enter(layer, around, False)
        return lines_of(lambda: scopes.enter(layers[-1], around, False))

    for inside in (False, True):
        cost(2, inside=inside)
        assert cost(100, inside=inside) == cost(3, inside=inside)


def test_the_lowest_number_is_given_again_when_its_module_has_died() -> None:
    scopes = new_scopes()
    top = nn.Module()
    around = scopes.enter(top, None, False)
    layers = [nn.Linear(2, 2) for _ in range(4)]

    def paths() -> list[str]:
        return [scopes.enter(layer, around, False).path for layer in layers]

    assert paths() == ["<Linear>", "<Linear>#2", "<Linear>#3", "<Linear>#4"]
    layers[1:3] = []
    assert paths() == ["<Linear>", "<Linear>#4"]
    layers += [nn.Linear(2, 2) for _ in range(3)]
    assert paths()[2:] == ["<Linear>#2", "<Linear>#3", "<Linear>#5"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("large", [1_000, 10_000])
@pytest.mark.parametrize("make", PROGRAMS)
@pytest.mark.parametrize("tool", ALL)
def test_costs_are_linear_at_sizes(tool: str, make: Callable[[int], Program], large: int) -> None:
    if why := WITH_ALL.get(tool, {}).get(make):
        pytest.skip(f"its cost grows with the program, since {why}")
    check(make, ALL[tool], large // 10, large)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("tool", "make"), LARGE)
def test_costs_are_linear_at_100_000_things(tool: str, make: Callable[[int], Program]) -> None:
    check(make, ALL[tool], 10_000, 100_000)
