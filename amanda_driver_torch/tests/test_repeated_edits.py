"""Edits in the second and later executions of an op, when its plan is run in its cached form.

The oracle is the plain program, with what a tool changes written into it by hand.
"""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import amanda
from amanda_core.errors import EditError, RoutineResultError
from amanda_core.testing.kit.tools import after, at_inputs, at_outputs, before, idle
from amanda_driver_torch.torch_internals.extension import native
from amanda_driver_torch.torch_internals.internals import make_saved_tensor

from .repeated_executions import TIMES, data, product
from .tensors import check_references, close, equal, leaf

WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients": nullcontext,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def plain(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    with amanda.disabled():
        return F.linear(x.detach(), w.detach(), None if b is None else b.detach())


class From(amanda.Tool):
    """Edits one input of linear from the second execution on, each time by another factor."""

    def __init__(self, position: int = 1, first: int = 2) -> None:
        super().__init__()
        self.calls, self.first, self.position = 0, first, position
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.op_type == "linear":
            context.insert_before_op(self.scale, inputs=[self.position])

    def scale(self, value: torch.Tensor) -> torch.Tensor | None:
        self.calls += 1
        return value * self.calls if self.calls >= self.first else None


@ways
@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_input_is_edited_in_each_execution_as_if_by_hand(
    position: int, way: Callable[[], AbstractContextManager[Any]]
) -> None:
    x, w, b = leaf(4, 3), leaf(5, 3), leaf(5)
    with amanda.apply(From(position)), way():
        found = [F.linear(x, w, b) for _ in range(TIMES)]
    for n, output in enumerate(found, 1):
        values = [x.detach(), w.detach(), b.detach()]
        values[position] = values[position] * (max(1, n))
        equal(output.detach(), F.linear(*values))


@ways
@pytest.mark.parametrize("named", [False, True], ids=["by position", "by name"])
def test_inputs_by_name_and_those_left_out(
    named: bool, way: Callable[[], AbstractContextManager[Any]]
) -> None:
    x, w = data()
    bias = torch.arange(5.0)
    edits = [
        before("linear", lambda weight: weight + 1, [1]),
        # Not given in the call: an edit makes it one that is.
        before("linear", lambda b: bias if b is None else b + bias, [2]),
    ]
    with amanda.apply(*edits), way():
        for _ in range(TIMES):
            output = F.linear(x, weight=w) if named else F.linear(x, w)
            equal(output.detach(), plain(x, w + 1, bias))


@ways
def test_several_tools_edit_one_after_the_other(
    way: Callable[[], AbstractContextManager[Any]],
) -> None:
    x, w = data()
    seen: list[Any] = []
    tools = [
        before("linear", lambda value: value * 2, [1]),
        before("linear", lambda *values: seen.append(values[1].detach().clone())),
        before("linear", lambda value: value + 1, [1]),
        after("linear", lambda value: value * 3),
        after("linear", lambda value: seen.append(value.detach().clone())),
        after("linear", lambda value: value - 1),
    ]
    with amanda.apply(*tools), way():
        for _ in range(TIMES):
            seen.clear()
            output = product(x, w)
            inner = plain(x, w * 2 + 1)
            equal(output.detach(), inner * 3 - 1)
            equal(seen, [w.detach() * 2, inner * 3])


def test_gradients_go_straight_through_edits() -> None:
    x, w = data()
    tools = [
        before("linear", lambda value: value * 2, [1]),
        after("linear", lambda value: value.clamp(min=0)),
    ]
    with amanda.apply(*tools, idle()):
        for _ in range(TIMES):
            found = torch.autograd.grad(product(x, w).square().sum(), (x, w))
            arriving = 2 * plain(x, 2 * w).clamp(min=0)
            close(found[0], arriving @ (2 * w.detach()))
            close(found[1], arriving.T @ x.detach())


def test_edits_beside_hooks_at_gradients() -> None:
    x, w = data()
    tools = [
        before("linear", lambda value: value * 2, [1]),
        after("linear", lambda value: value + 1),
        at_outputs("linear", lambda grad: grad * 10, [0]),
    ]
    with amanda.apply(*tools):
        for _ in range(TIMES):
            found = torch.autograd.grad(product(x, w).sum(), (x, w))
            close(found[0], 10 * torch.ones(4, 5) @ (2 * w.detach()))
            close(found[1], 10 * torch.ones(4, 5).T @ x.detach())


def laid_otherwise(value: torch.Tensor) -> torch.Tensor:
    return value.t().contiguous().t()


class Subclass(torch.Tensor):
    """A tensor whose attributes C must not read."""


#: What a routine makes of twice the weight, from some execution on.
FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it was": lambda value: value,
    "laid otherwise": laid_otherwise,
    "a parameter": torch.nn.Parameter,
    "a subclass": lambda value: value.as_subclass(Subclass),
}


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("parameter", [False, True])
def test_a_weight_and_its_gradient_are_edited_together(
    parameter: bool, form: Callable[[torch.Tensor], torch.Tensor], first: int
) -> None:
    x, w = data()
    w = torch.nn.Parameter(w.detach()) if parameter else w
    mask, calls = torch.arange(15.0).reshape(5, 3) % 2, [0]

    def double(value: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return value * 2 if calls[0] < first else form(value.detach() * 2)

    tools = [
        before("linear", double, [1]),
        at_inputs("linear", lambda grad: grad * mask, [1]),
        at_inputs("linear", lambda grad: grad * 10, [0]),
    ]
    with amanda.apply(*tools):
        for _ in range(TIMES):
            found = torch.autograd.grad(product(x, w).square().sum(), (x, w))
            arriving = 2 * plain(x, 2 * w)
            close(found[0].as_subclass(torch.Tensor), 10 * arriving @ (2 * w.detach()))
            close(found[1].as_subclass(torch.Tensor), mask * (arriving.T @ x.detach()))


@pytest.mark.parametrize("op", ["cat", "view"])
def test_an_input_and_its_gradient_are_edited_where_edits_have_nodes(op: str) -> None:
    x, y = leaf(4, 3), leaf(4, 3)
    programs: dict[str, Callable[[], torch.Tensor]] = {
        "cat": lambda: torch.cat([x, y]),
        "view": lambda: x.view(12),
    }

    def double(value: Any) -> Any:
        return [one * 2 for one in value] if op == "cat" else value * 2

    def scale(grad: Any) -> Any:
        return [one * 10 for one in grad] if op == "cat" else grad * 10

    with amanda.apply(before(op, double, [0]), at_inputs(op, scale, [0])):
        for _ in range(TIMES):
            output = programs[op]()
            (found,) = torch.autograd.grad(output.square().sum(), [x])
            close(output.detach().flatten()[:12], 2 * x.detach().flatten())
            close(found, 10 * 2 * 2 * x.detach())


@pytest.mark.one_interceptor
@pytest.mark.skipif(native is None, reason="the native interceptor is not available")
@pytest.mark.skipif(
    make_saved_tensor is None,
    reason="this PyTorch cannot make saved tensors, so an edit adds a node, which Python hooks",
)
def test_a_weight_and_its_gradient_are_edited_without_the_driver_s_python() -> None:
    x, w = data()
    calls: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and ".execution." in frame.f_globals.get("__name__", ""):
            calls.append(frame.f_code.co_name)

    tools = [
        before("linear", lambda value: value * 2, [1]),
        at_inputs("linear", lambda grad: grad * 10, [1]),
    ]
    with amanda.apply(*tools):
        for _ in range(TIMES):
            product(x, w)
        sys.setprofile(profile)
        try:
            product(x, w)
        finally:
            sys.setprofile(None)
    assert calls == []


@pytest.mark.parametrize("kind", ["value", "gradient"])
@pytest.mark.parametrize("wrong", [lambda value: value[:1], lambda value: 3.0])
def test_an_edit_that_does_not_fit_is_refused_after_others_were_accepted(
    kind: str, wrong: Callable[[torch.Tensor], Any]
) -> None:
    (x, w), calls = data(), 0

    def edit(value: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        return wrong(value) if calls > TIMES else value * 2

    tool = before("linear", edit, [1]) if kind == "value" else at_inputs("linear", edit, [1])
    with amanda.apply(tool):
        for number in range(TIMES + 2):
            with pytest.raises(EditError) if number >= TIMES else nullcontext():
                (found,) = torch.autograd.grad(product(x, w).sum(), w)
                close(found, (1 if kind == "value" else 2) * torch.ones(4, 5).T @ x.detach())


def test_several_tools_edit_one_gradient_in_their_order() -> None:
    (x, w), seen = data(), list[torch.Tensor]()
    tools = [
        at_inputs("linear", lambda grad: grad * 2, [1]),
        at_inputs("linear", lambda grad: seen.append(grad), [1]),
        at_inputs("linear", lambda grad: grad + 1, [1]),
        at_inputs("linear", lambda grad: grad.to(torch.float64).float() * 3, [1]),
    ]
    with amanda.apply(*tools):
        for _ in range(TIMES):
            (found,) = torch.autograd.grad(product(x, w).sum(), w)
            expected = torch.ones(4, 5).T @ x.detach()
            close(found, (2 * expected + 1) * 3)
            close(seen[-1], 2 * expected)


def test_an_op_that_hands_back_its_edited_input() -> None:
    x = leaf(4)
    with amanda.apply(before("dropout", lambda value: value + 1, [0])):
        for _ in range(TIMES):
            output = F.dropout(x, training=False)
            equal(output.detach(), x.detach() + 1)
            (found,) = torch.autograd.grad(output.sum(), x)
            equal(found, torch.ones(4))


def test_views_and_lists() -> None:
    x, y = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    tools = [
        after("transpose", lambda view: view * 2),
        before("cat", lambda parts: [part + 1 for part in parts], [0]),
    ]
    with amanda.apply(*tools):
        for _ in range(TIMES):
            equal(x.transpose(0, 1), 2 * x.T)
            equal(torch.cat([x, y]), torch.stack([x, y]).flatten(0, 1) + 1)


def test_what_an_op_writes_is_edited_where_it_lies() -> None:
    mean, variance, x = torch.zeros(3), torch.ones(3), torch.randn(8, 3)
    with amanda.apply(before("batch_norm", lambda value: value + 1, [3])):
        for _ in range(TIMES):
            mean.zero_()
            F.batch_norm(x, mean, variance, training=True, momentum=0.5)
            close(mean, 0.5 * torch.ones(3) + 0.5 * x.mean(0))


@pytest.mark.parametrize("gradients", [True, False])
def test_a_wrong_edit_is_an_error_of_the_tool_and_the_next_run_works(gradients: bool) -> None:
    x, w = data()
    calls = [0]

    def third(value: torch.Tensor) -> Any:
        calls[0] += 1
        return (value, value) if calls[0] == 3 else value[:2] if calls[0] == 4 else value * 2

    with amanda.apply(before("linear", third, [1])), torch.set_grad_enabled(gradients):
        for n in range(1, 2 * TIMES):
            if n == 3:
                with pytest.raises(RoutineResultError, match=r"third.*linear"):
                    product(x, w)
            elif n == 4 and gradients:
                with pytest.raises(EditError, match=r"shape.*third.*linear"):
                    product(x, w)
            else:
                equal(product(x, w).detach(), plain(x, w[:2] if n == 4 else w * 2))


def test_function_modes_of_the_user_hear_nothing_of_edits() -> None:
    heard: list[str] = []

    class Hears(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            heard.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    x, w = data()
    with amanda.apply(From(1, first=1)), Hears():
        for n in range(1, TIMES + 1):
            heard.clear()
            output = product(x, w)
            # Whether they see what the routine itself computes depends on the interceptor.
            assert [name for name in heard if name != "mul"] == ["linear"]
            equal(output.detach(), plain(x, w * n))


@pytest.mark.slow
def test_values_die_after_the_execution() -> None:
    x, w = data()
    made: list[weakref.ref[torch.Tensor]] = []

    def edit(value: torch.Tensor) -> torch.Tensor:
        new = value * 2
        made.append(weakref.ref(new))
        return new

    with amanda.apply(before("linear", edit, [1])), torch.no_grad():
        for _ in range(TIMES):
            product(x, w)
            gc.collect()
            assert made[-1]() is None


@pytest.mark.slow
def test_edits_leave_no_reference_behind() -> None:
    x, w = data()

    def grow(value: torch.Tensor) -> torch.Tensor:
        return value + 1

    tools = [before("linear", grow, [1]), after("linear", grow), before("linear", lambda *v: None)]
    with amanda.apply(*tools):
        for switch in (torch.no_grad, torch.enable_grad):
            with switch():
                check_references(lambda: product(x, w), 100, own=[x, w, grow])


@pytest.mark.parametrize("outputs", [False, True], ids=["inputs", "outputs too"])
@pytest.mark.parametrize("factor", [None, 2.0], ids=["leaves", "values"])
def test_edited_inputs_that_are_handed_back(outputs: bool, factor: float | None) -> None:
    """An op that makes no node has no gradients."""
    tool, called = amanda.Tool(), []

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "expand":
            context.insert_before_op(lambda tensors: [x.clone() for x in tensors])
            if outputs:
                context.insert_after_op(lambda *tensors: [x.clone() for x in tensors])
            context.insert_before_backward_op(lambda *grads: called.append(grads))
            context.insert_after_backward_op(lambda *grads: called.append(grads))

    tool.add_inst_for_op(analyse)
    x, y = leaf(5), leaf(5)
    with amanda.apply(tool):
        for _ in range(TIMES):
            given = (x, y) if factor is None else (x * factor, y * factor)
            first, second = torch.broadcast_tensors(*given)
            torch.sum(first * second).backward()
    assert not called
