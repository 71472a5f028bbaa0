"""Every way to run a backward pass, and one that comes after the tools were left."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_core.errors import AmandaWarning
from amanda_core.testing.kit.tools import at_inputs, at_outputs, before, tool, watching_backward

from .tensors import close, equal, grad_of, leaf, leaf_copy

# Ways to run a backward pass.


def test_autograd_grad_and_inputs_run_what_they_need_only() -> None:
    x, w = leaf(3), leaf(3)
    seen, watch = watching_backward()
    with amanda.apply(watch, at_inputs("mul", lambda g: g * 2, [0])):
        (grad,) = torch.autograd.grad((x * w).sum(), x)
        assert ("AccumulateGrad", None) not in seen
        (x * w).sum().backward(inputs=[w])
    equal(grad, 2 * w.detach())
    assert x.grad is None
    equal(grad_of(w), x.detach())


def test_retained_graph_runs_routines_twice() -> None:
    x, calls = leaf(3), list[int]()

    def routine(grad: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return grad * 2

    with amanda.apply(at_inputs("exp", routine, [0])):
        loss = x.exp().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert len(calls) == 2
    equal(grad_of(x), 4 * x.detach().exp())


def test_gradients_accumulate_over_passes() -> None:
    layer, x = nn.Linear(2, 1), torch.randn(3, 2)
    with amanda.apply(at_inputs("linear", lambda g: g * 2, [1])):
        for _ in range(2):
            layer(x).sum().backward()
    close(grad_of(layer.weight), 4 * x.sum(0, keepdim=True))


def test_retained_gradient_is_the_edited_one_that_flows_on() -> None:
    x = leaf(3)
    with amanda.apply(at_outputs("exp", lambda g: g * 3)):
        y = x.exp()
        y.retain_grad()
        y.sum().backward()
    equal(grad_of(y), torch.full((3,), 3.0))
    equal(grad_of(x), 3 * x.detach().exp())


def test_hooks_of_the_user_are_undisturbed() -> None:
    def program(x: torch.Tensor, log: list[Any]) -> None:
        y = x.exp()
        y.register_hook(lambda g: log.append(("y", g.tolist())))
        x.register_hook(lambda g: log.append(("x", g.tolist())))
        x.register_post_accumulate_grad_hook(lambda t: log.append(("after", grad_of(t).tolist())))
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(lambda grads: log.append(("pre", grads[0].tolist())))
        y.grad_fn.register_hook(lambda results, grads: log.append(("post", results[0].tolist())))
        (y * 2 + y).sum().backward()

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(lambda *grads: None)
        if context.is_forward():
            context.insert_after_backward_op(lambda *grads: None)

    watch = tool(analyse)
    watch.add_inst_for_op(analyse, backward=True)
    x = leaf(2)
    plain, logged = list[Any](), list[Any]()
    program(leaf_copy(x), plain)
    with amanda.apply(watch):
        program(x, logged)
    assert [what for what, _ in plain] == ["y", "pre", "post", "x", "after"]
    assert logged == plain


def test_backward_in_another_thread_belongs_to_the_session_of_its_forward() -> None:
    x = leaf(3)
    seen, watch = watching_backward()
    with amanda.apply(watch, at_inputs("exp", lambda g: g * 2, [0])):
        loss = x.exp().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    equal(grad_of(x), 2 * x.detach().exp())
    assert ("ExpBackward0", "exp") in seen


def test_disabled_counts_as_it_stands_when_backward_is_called() -> None:
    x, calls = leaf(3), list[Any]()
    with amanda.apply(at_inputs("exp", calls.append, [0])):
        loss = x.exp().sum()
        with amanda.disabled():
            loss.backward(retain_graph=True)
        assert calls == []
        loss.backward()
    assert len(calls) == 1


# After `apply` ended.


def test_backward_after_leaving_keeps_edits_warns_once_and_runs_no_routine() -> None:
    x, calls = leaf(3), list[Any]()
    seen, watch = watching_backward()
    with amanda.apply(before("exp", lambda v: v + 1), at_inputs("exp", calls.append, [0]), watch):
        losses = [x.exp().sum(), x.exp().sum()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loss in losses:
            loss.backward()
    assert [w.category for w in caught] == [amanda.AmandaWarning]
    assert "after `apply` ended" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert calls == []
    assert seen == []
    equal(grad_of(x), 2 * (x.detach() + 1).exp())


def test_leaf_of_an_earlier_session_gives_no_warning() -> None:
    x, watch = leaf(3), tool(lambda context: None, backward=True)
    held = []
    for tools in ([watch], [watch], []):
        with amanda.apply(*tools):
            held.append(x.exp().sum())
            held[-1].backward()
    held.append(x.exp().sum())
    held[-1].backward()
    close(grad_of(x), 4 * x.detach().exp())


@pytest.mark.parametrize("backward", [False, True], ids=["aligned", "raw"])
def test_an_inner_tool_left_before_backward_is_missed_with_one_warning(backward: bool) -> None:
    def ask(context: amanda.OpContext) -> None:
        context.insert_after_backward_op(lambda g: g * 2, [0])

    inner = tool(ask, "ReluBackward0" if backward else "relu", backward=backward)
    x = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with amanda.apply(amanda.Tool()):
            with amanda.apply(inner):
                y = torch.relu(x).sum()
            y.backward()
    assert [w.category for w in caught] == [AmandaWarning]
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0, 1.0]


def clones(*grads: Any) -> tuple[Any, ...]:
    return tuple(grad if grad is None else grad.clone() for grad in grads)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("raw", [False, True])
def test_gradients_of_edited_gradients_pass_straight_through(raw: bool, after: bool) -> None:
    def analyse(context: amanda.OpContext) -> None:
        if after:
            context.insert_after_backward_op(clones)
        else:
            context.insert_before_backward_op(clones)

    def penalty(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        loss: torch.Tensor = (grad.norm(dim=1) - 1).square().mean()
        return loss

    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), leaf(5, 4)
    penalty(net, x).backward()
    expected = [p.grad for p in net.parameters()]
    net.zero_grad()
    with amanda.apply(tool(analyse, backward=raw)):
        penalty(net, x).backward()
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            assert torch.equal(grad_of(parameter), gradient)


def test_replaced_backward_is_differentiated_as_written() -> None:
    class Reference(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 3

    def second(function: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(function(x * w).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.sum(), w)[0]

    x, w = leaf(4), leaf(4)
    expected = second(Reference.apply, x, w)
    replacing = tool(lambda c: c.replace_backward_op(lambda g: g * 3, [0]), "tanh")
    with amanda.apply(replacing):
        close(second(torch.tanh, x, w), expected)


def test_a_leaf_s_node_that_lives_on_belongs_to_the_newest_graph() -> None:
    layer = nn.Linear(2, 2)
    watch = tool(lambda context: None, backward=True)
    with amanda.apply(tool(lambda context: None, backward=True)):
        with amanda.apply(watch):
            kept = layer(torch.ones(1, 2)).sum()  # Its graph holds the nodes of the parameters.
        layer(torch.ones(1, 2)).sum().backward()  # Warns of nothing: all of its tools are there.
    del kept
