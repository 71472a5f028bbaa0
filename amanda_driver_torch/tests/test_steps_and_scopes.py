"""Steps end with `optimizer.step()` or `amanda.step()`; scopes follow the modules' calls."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_core.engine.calls import MODULE_INPUT, MODULE_OUTPUT
from amanda_core.testing.kit.tools import before, tool

X = torch.ones(1, 2)


class Steps(amanda.Tool):
    """Writes down begins and ends, and ops between them."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.add_inst_for_step(
            lambda step: self.log.append(("begin", step)),
            lambda step: self.log.append(("end", step)),
        )


def step(number: int) -> list[Any]:
    """Return the entries of one step's end, after which the next step begins at once."""
    return [("end", number), ("begin", number + 1)]


def test_step_of_an_optimizer_ends_a_step() -> None:
    model, steps = nn.Linear(2, 1), Steps()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with amanda.apply(steps):
        for _ in range(2):
            optimizer.zero_grad()
            model(X).sum().backward()
            steps.log.append("work")
            optimizer.step()
    assert steps.log == [("begin", 0), "work", *step(0), "work", *step(1)]


def test_each_of_several_optimizers_ends_a_step() -> None:
    model, steps = nn.Linear(2, 1), Steps()
    first = torch.optim.SGD([model.weight], 0.1)
    second = torch.optim.Adam([model.bias])
    with amanda.apply(steps):
        model(X).sum().backward()
        first.step()
        second.step()
    assert steps.log == [("begin", 0), *step(0), *step(1)]


def test_step_with_a_closure_called_many_times_is_one_step() -> None:
    model, steps, calls = nn.Linear(2, 1), Steps(), list[int]()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Any:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(X).square().sum()
        loss.backward()
        return loss

    with amanda.apply(steps):
        optimizer.step(closure)
    assert len(calls) > 1
    assert steps.log == [("begin", 0), *step(0)]


def test_step_can_be_ended_by_hand() -> None:
    steps = Steps()
    with amanda.apply(steps):
        amanda.step()
        amanda.step()
    assert steps.log == [("begin", 0), *step(0), *step(1)]


def test_step_of_another_optimizer_is_none_of_ours() -> None:
    model, steps = nn.Linear(2, 1), Steps()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    with amanda.apply(steps):
        with amanda.disabled():
            optimizer.step()
        assert ("end", 0) not in steps.log
    optimizer.step()
    assert ("end", 0) not in steps.log


def test_schedule_by_invalidation_at_the_end_of_a_step() -> None:
    factors: list[float] = []

    class Schedule(amanda.Tool):
        def __init__(self) -> None:
            self.factor = 1.0
            self.add_inst_for_op(self.analyse)
            self.add_inst_for_step(end=self.advance)

        def analyse(self, context: amanda.OpContext) -> None:
            if context.op_type == "linear":
                factor = self.factor
                context.insert_before_op(lambda x: factors.append(factor), inputs=[0])

        def advance(self, number: int) -> None:
            self.factor /= 2
            self.invalidate()

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with amanda.apply(Schedule()):
        for _ in range(3):
            model(X)
            model(X)
            optimizer.step()
    assert factors == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


# Scopes.


class Branch(nn.Module):
    """Calls one child twice and the other not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.used(self.used(x))


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise LookupError


class Scopes(amanda.Tool):
    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self.add_inst_for_scope(
            lambda path: self.log.append(("enter", path)),
            lambda path: self.log.append(("leave", path)),
        )


def test_scopes_are_entered_and_left_like_hooks_are_called() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Branch(), nn.Sequential(nn.ReLU(), nn.Linear(2, 1)))
    hooked: list[tuple[str, str]] = []
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda m, x, path=path: hooked.append(("enter", path)))
        module.register_forward_hook(lambda m, x, y, path=path: hooked.append(("leave", path)))
    scopes = Scopes()
    with amanda.apply(scopes):
        model(X)
    assert len(hooked) == 16
    assert scopes.log == hooked


def test_scope_is_left_by_an_exception() -> None:
    scopes = Scopes()
    with pytest.raises(LookupError), amanda.apply(scopes):
        nn.Sequential(nn.ReLU(), Failing())(X)
    assert scopes.log == [
        ("enter", ""),
        ("enter", "0"),
        ("leave", "0"),
        ("enter", "1"),
        ("leave", "1"),
        ("leave", ""),
    ]


def test_ops_lie_in_the_scope_that_was_entered_last() -> None:
    scopes, paths = Scopes(), list[str]()

    def analyse(context: amanda.OpContext) -> None:
        assert scopes.log[-1] == ("enter", context.module_path)
        paths.append(context.module_path)

    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    with amanda.apply(scopes, tool(analyse)):
        model(X)
    assert paths == ["0", "1.0"]


def test_listeners_may_compute_without_being_instrumented() -> None:
    calls: list[int] = []

    def compute(what: object) -> None:
        torch.exp(X)

    made = before("exp", lambda *values: calls.append(1))
    made.add_inst_for_scope(compute, compute)
    made.add_inst_for_step(compute, compute)
    with amanda.apply(made):
        nn.ReLU()(X)
        amanda.step()
    assert calls == []


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_closure_of_an_optimizer_is_the_model(kind: Any) -> None:
    layer, x, zones = nn.Linear(4, 2), torch.randn(3, 4), set[tuple[str, str]]()
    optimizer = kind(layer.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = layer(x).square().mean()
        loss.backward()
        return loss

    with amanda.apply(tool(lambda c: zones.add((c.op_type, c.zone)))):
        optimizer.step(closure)
    assert {zone for op_type, zone in zones if op_type in ("linear", "mean")} == {"model"}
    assert "optimizer" in {zone for _, zone in zones}


class Written(nn.Module):
    """A module of the program, whose `forward` Dynamo is given as a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


@pytest.mark.filterwarnings("ignore:Compiled callables run eagerly")
@pytest.mark.parametrize("make", [Written, lambda: nn.Sequential(nn.Linear(2, 2))])
@pytest.mark.parametrize("when", ["before", "under tools"])
def test_a_compiled_module_that_runs_eagerly_is_entered_once(make: Any, when: str) -> None:
    model, plain, compiled = make(), Scopes(), Scopes()
    shown: list[str] = []
    follows = tool(lambda context: shown.append(context.name))
    follows.show_modules("*", inputs=True, outputs=True)
    follows.where(amanda.select(op=[MODULE_INPUT, MODULE_OUTPUT]))
    other = torch.compile(model, backend="eager") if when == "before" else None
    with amanda.apply(plain):
        model(torch.ones(1, 2))
    with amanda.apply(compiled, follows):
        if other is None:
            other = torch.compile(model, backend="eager")
        for _ in range(2):
            other(torch.ones(1, 2))
    assert plain.log[0] == ("enter", "")
    assert compiled.log == plain.log * 2
    assert len(shown) == len(plain.log)
    assert len({*shown}) == len(shown)
