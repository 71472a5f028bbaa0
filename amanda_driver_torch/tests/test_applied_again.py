"""Tools that are left and applied again: what is known of operators resumes, and nothing else."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda

from .tensors import equal

X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.relu(self.first(x)) + 1))


class Shifting(amanda.Tool):
    """Adds to what some operators write, and notes what it analyses and what runs."""

    #: Whether it also inserts something at gradients, if it analyses backward operators.
    notes = True

    def __init__(self, *types: str, backward: bool = False) -> None:
        super().__init__()
        self.types = types
        self.analysed: list[tuple[str, int]] = []
        self.runs: list[str] = []
        self.add_inst_for_op(self.analyse)
        if backward:
            self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        self.analysed.append((context.name, context.get_op_id()))
        if context.op_type in self.types:
            context.insert_after_op(self.shift, outputs=[0], name=context.name)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        self.analysed.append((context.name, context.get_backward_op_id() or 0))
        if self.notes:
            context.insert_before_backward_op(self.note, name=context.name)

    def shift(self, value: torch.Tensor, name: str) -> torch.Tensor:
        self.runs.append(name)
        return value + 0.5

    def note(self, *gradients: Any, name: str) -> None:
        self.runs.append(name)


def shifted(net: Net, x: torch.Tensor, *types: str) -> torch.Tensor:
    """Compute what `Shifting` makes of a network."""
    by = {name: 0.5 * (name in types) for name in ("linear", "relu", "tanh")}
    with amanda.disabled(), torch.no_grad():
        x = torch.relu(net.first(x) + by["linear"]) + by["relu"]
        return torch.tanh(net.second(x + 1) + by["linear"]) + by["tanh"]


def own_calls(run: Callable[[], object]) -> int:
    """Return how many functions of Amanda a program calls."""
    count = 0

    def profile(frame: Any, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_globals.get("__name__", "").startswith("amanda")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.one_interceptor
@pytest.mark.parametrize(
    ("types", "trains"),
    [((), False), (("relu", "add"), False), ((), True)],
    ids=["nothing", "edits", "nothing, with gradients"],
)
def test_no_operator_is_resolved_again(
    types: tuple[str, ...], trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")

    class Chain(nn.Module):
        length = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.length):
                x = torch.relu(x) + 1
            return x

    def more(length: int) -> int:
        """Return how many calls more the first run takes than a later one, when applied again."""
        net, tool = Chain(), Shifting(*types, backward=trains)
        net.length, tool.notes = length, False
        x = X.clone().requires_grad_(trains)

        def run() -> None:
            y = net(x)
            if trains:
                y.backward(torch.ones_like(x))

        with amanda.apply(tool):
            run()
            run()
        with amanda.apply(tool):
            calls = own_calls(run), own_calls(run)
            return calls[0] - calls[1]

    assert more(1) == more(40)


def test_results_are_those_of_one_session() -> None:
    net, tool = Net().requires_grad_(False), Shifting("relu", "linear")
    expected = shifted(net, X, "relu", "linear")
    for _ in range(3):
        with amanda.apply(tool):
            got = net(X), net(X)
        equal(got, (expected, expected))
        equal(net(X), shifted(net, X))
    assert len(tool.analysed) == 5
    assert tool.runs == ["first/linear", "relu", "second/linear"] * 6


def test_gradients() -> None:
    net, tool = Net(), Shifting("linear", backward=True)
    counts = []
    for _ in range(3):
        tool.runs.clear()
        with amanda.apply(tool):
            net(X).sum().backward()
        counts.append(len(tool.runs))
    assert counts[0] == counts[1] == counts[2] > 7
    assert len({name for name, _ in tool.analysed}) == len(tool.analysed)


def test_a_graph_of_the_session_before_runs_without_tools() -> None:
    net, tool = Net(), Shifting(backward=True)
    with amanda.apply(tool):
        net(X).sum().backward()
        loss = net(X).sum()
    tool.runs.clear()
    with amanda.apply(tool), pytest.warns(amanda.AmandaWarning, match="after `apply` ended"):
        loss.backward()
    assert not [name for name in tool.runs if "linear" in name]


def test_what_changed_meanwhile_is_seen() -> None:
    net, tool = Net(), Shifting("relu")
    with amanda.apply(tool):
        net(X)
    with torch.no_grad():
        net.first.weight.mul_(2)
    net.second = nn.Linear(5, 2)
    net.double()
    x = X.double()
    with amanda.apply(tool):
        equal(net(x).detach(), shifted(net, x, "relu"))
    net.forward = lambda x: torch.relu(net.first(x))  # type: ignore[method-assign]
    with amanda.apply(tool):
        got = net(x).detach()
    equal(got, torch.relu(net.first(x)).detach() + 0.5)
    assert net(x).min() < 0.5


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_conversions_meanwhile_make_no_new_operators(trains: bool) -> None:
    net, tool = Net(), Shifting("relu", "linear", backward=True)
    for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
        net.to(dtype)
        with amanda.apply(tool), torch.set_grad_enabled(trains):
            loss = net(X.to(dtype)).square().sum()
            if trains:
                torch.autograd.backward(loss)
    assert len({*tool.analysed}) == len(tool.analysed)
    assert len({name for name, _ in tool.analysed}) == len(tool.analysed)


def test_tools_that_analyse_again() -> None:
    net, tool = Net(), Shifting("relu")
    with amanda.apply(tool):
        net(X)
    tool.types = ("tanh",)
    tool.invalidate()
    with amanda.apply(tool):
        equal(net(X).detach(), shifted(net, X, "tanh"))


def test_other_tools_between() -> None:
    net, tools = Net(), [Shifting("relu"), Shifting("tanh")]
    for _ in range(2):
        for tool in tools:
            with amanda.apply(tool):
                equal(net(X).detach(), shifted(net, X, *tool.types))
        with amanda.apply(*tools):
            equal(net(X).detach(), shifted(net, X, "relu", "tanh"))


def test_leaving_inside_a_module() -> None:
    tool = Shifting("relu")

    class Leaving(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(x)
            handle.remove()
            return torch.relu(x)

    net = Leaving()
    for _ in range(2):
        handle = amanda.attach(tool)
        equal(net(X), torch.relu(X) + 0.5)


def test_nothing_keeps_a_model_or_a_tool() -> None:
    def run() -> tuple[list[weakref.ref[Any]], Shifting]:
        net, tool = Net(), Shifting("relu", "linear", backward=True)
        for _ in range(2):
            with amanda.apply(tool):
                net(X).sum().backward()
        return [weakref.ref(net), weakref.ref(net.first.weight), weakref.ref(net.second)], tool

    left, tool = run()
    gc.collect()
    assert [one() for one in left] == [None] * 3
    left.append(weakref.ref(tool))
    del tool
    gc.collect()
    assert left[-1]() is None


@pytest.mark.one_interceptor
def test_an_interceptor_that_was_chosen_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    net, tool = Net(), Shifting("relu")
    for name in ("native", "function_mode", "native"):
        monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", name)
        with amanda.apply(tool):
            equal(net(X).detach(), shifted(net, X, "relu"))
