"""Calls of outermost modules are counted; what modules take and return is shown to who asks."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amanda
from amanda_core.engine.calls import MODULE_INPUT, MODULE_OUTPUT, Call
from amanda_core.testing.kit.tools import tool

from .interceptors import STAYS_COMPILED

X = torch.ones(1, 2)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))


class Calls(amanda.Tool):
    """Writes down calls."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, int]] = []
        self.add_inst_for_call(self.begin, self.end)

    def begin(self, call: Call) -> None:
        self.log.append(("begin", call.module, call.number))

    def end(self, call: Call) -> None:
        self.log.append(("end", call.module, call.number))


class Failing(nn.Module):
    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        raise LookupError


def both(module: str, number: int) -> list[tuple[str, str, int]]:
    return [("begin", module, number), ("end", module, number)]


def test_calls_of_each_outermost_module_are_counted() -> None:
    calls, first, second = Calls(), network(), nn.Linear(2, 2)
    with amanda.apply(calls):
        first(X)
        second(X)
        first(X)
        with amanda.disabled():
            first(X)
        amanda.step()
        first(X)
    expected = [("Sequential", 0), ("Linear", 0), ("Sequential", 1), ("Sequential", 0)]
    assert calls.log == [entry for call in expected for entry in both(*call)]


@pytest.mark.one_interceptor
@STAYS_COMPILED
def test_a_call_of_a_compiled_module_is_one_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    calls, model = Calls(), torch.compile(network(), backend="eager")
    with amanda.apply(calls) as handle:
        model(X)
        model(X)
        gaps = [gap.what for gap in handle.coverage()["pytorch"]]
    assert calls.log == [*both("Sequential", 0), *both("Sequential", 1)]
    assert not any("compiled callable" in what for what in gaps), gaps


def test_a_call_tells_its_arguments_and_ends_with_an_exception() -> None:
    given: list[Any] = []
    calls = Calls()
    calls.add_inst_for_call(lambda call: given.append((*call.args, dict(call.kwargs), call.facts)))
    model = Failing()
    with amanda.apply(calls):
        with pytest.raises(LookupError):
            model(X, scale=2.0)
        with pytest.raises(LookupError):
            model(X, scale=3.0)
    assert calls.log == [*both("Failing", 0), *both("Failing", 1)]
    assert given[0][0] is X
    assert [kwargs for _, kwargs, _ in given] == [{"scale": 2.0}, {"scale": 3.0}]
    assert given[0][2].shape(X) == (1, 2)


def doubling(context: amanda.OpContext) -> None:
    if context.op_type == "linear":
        context.insert_after_op(lambda value: value * 2)


def test_only_the_chosen_call_is_edited() -> None:
    model: Any = network()
    with torch.no_grad():
        plain, edited = model(X), model[1][1](torch.relu(model[0](X) * 2)) * 2
        with amanda.apply(tool(doubling).where(amanda.select(calls=[1]))):
            found = [model(X) for _ in range(3)]
    for value, expected in zip(found, [plain, edited, plain], strict=True):
        assert torch.equal(value, expected)


def test_gradients_are_those_of_the_chosen_call() -> None:
    model, arrived = network(), list[float]()

    def analyse(context: amanda.OpContext) -> None:
        if context.name == "0/linear":
            context.insert_before_backward_op(
                lambda gradient: arrived.append(float(gradient.sum())), grad_outputs=[0]
            )

    expected = []
    for factor in (1.0, 2.0, 3.0):
        output = model[0](X)
        output.retain_grad()
        (model[1](output).sum() * factor).backward()
        expected.append(float(output.grad.sum()))
    with amanda.apply(tool(analyse).where(amanda.select(calls=[1]))):
        sum(model(X).sum() * factor for factor in (1.0, 2.0, 3.0)).backward()
    assert arrived == expected[1:2]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_as_the_call_ran(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    def gradients(model: Callable[..., Any], inner: nn.Sequential) -> list[Any]:
        x = X.clone().requires_grad_()
        inner.zero_grad()
        first, second = model(x), model(x)
        (first.square().sum() + 3 * second.square().sum()).backward()
        return [x.grad, *(weight.grad for weight in inner.parameters())]

    model = Checkpointed()
    chosen = amanda.select(calls=[1])
    with amanda.apply(tool(doubling).where(chosen)):
        expected = gradients(model.inner, model.inner)
    with amanda.apply(tool(doubling).where(chosen)):
        found = gradients(model, model.inner)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


# Values of modules.


class Pair(NamedTuple):
    number: int
    tensor: torch.Tensor


class Returning(nn.Module):
    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:
        return self.form(x + 1)


FORMS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda x: x, lambda result: result),
    "tuple": (lambda x: (None, x, x), lambda result: result[1]),
    "named tuple": (lambda x: Pair(1, x), lambda result: result.tensor),
    "list": (lambda x: [x], lambda result: result[0]),
    "mapping": (lambda x: {"n": 1, "x": (x,)}, lambda result: result["x"][0]),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_first_tensor_that_a_module_returns_is_shown_and_edited(form: str) -> None:
    make, read = FORMS[form]
    seen: list[str] = []
    other = tool(lambda context: seen.append(context.op_type))
    shown = tool(lambda c: c.insert_after_op(lambda v: v * 3) if "module" in c.op_type else None)
    shown.show_modules("*", outputs=True)
    model = Returning(make)
    plain = model(X)
    with amanda.apply(other, shown):
        edited = model(X)
    assert type(edited) is type(plain)
    assert torch.equal(read(edited), read(plain) * 3)
    assert seen == ["add"]


def test_the_first_tensor_that_a_module_is_given_is_shown_and_edited() -> None:
    class Named(nn.Module):
        def forward(self, flag: bool, *, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x - y

    shown = tool(
        lambda c: c.insert_after_op(lambda v: v * 3) if c.op_type == MODULE_INPUT else None
    )
    shown.show_modules(re.compile("^$"), inputs=True)
    model = Named()
    with amanda.apply(shown):
        assert torch.equal(model(True, x=X, y=X), 2 * X)
        (context,) = (c for c in shown_contexts(shown) if c.op_type == MODULE_INPUT)
        assert (context.module_path, context.name, context.zone) == ("", "module_input", "model")
    assert torch.equal(model(True, x=X, y=X), 0 * X)


def shown_contexts(applied: amanda.Tool) -> list[Any]:
    handle = amanda.attach(applied)
    try:
        assert handle.session is not None
        return list(handle.session.contexts())
    finally:
        handle.remove()


def test_an_edit_of_a_modules_value_goes_straight_through() -> None:
    model = network()
    shown = tool(
        lambda c: c.insert_after_op(lambda v: v * 3) if c.op_type == MODULE_OUTPUT else None
    )
    shown.show_modules("0", outputs=True)
    with amanda.apply(shown):
        x = X.clone().requires_grad_()
        model(x).sum().backward()
    output = model[0](X).detach() * 3
    output.requires_grad_()
    model[1](output).sum().backward()
    reference = X.clone().requires_grad_()
    model[0](reference).backward(output.grad)
    assert x.grad is not None
    assert reference.grad is not None
    assert torch.equal(x.grad, reference.grad)


def test_each_module_and_call_has_an_operator_of_its_own() -> None:
    names: list[str] = []
    ids: set[int] = set()

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == MODULE_OUTPUT:
            names.append(context.name)
            ids.add(context.get_op_id())

    shown = tool(analyse)
    shown.show_modules(["1", "1.*"], outputs=True)
    with amanda.apply(shown):
        model = network()
        for _ in range(3):
            model(X)
    assert names == ["1.0/module_output", "1.1/module_output", "1/module_output"]
    assert len(ids) == 3
