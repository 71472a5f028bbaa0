"""While tools stay applied they keep neither tensors nor the accumulation of their gradients."""

# mypy: allow-untyped-calls

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import amanda

W = torch.ones(3, requires_grad=True)


class Keeping(torch.autograd.Function):
    """Its output refers to its node, and the node to the output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.result = x * 2
        return ctx.result  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


def cycle() -> list[torch.Tensor]:
    x = torch.ones(3, requires_grad=True)
    hidden = x * W
    y = Keeping.apply(hidden)
    hidden.kept = y  # type: ignore[attr-defined]
    y.sum().backward()
    return [x, hidden, y]


class Told(torch.autograd.Function):
    """Keeps a dictionary, or an object without weak references, that is an input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, told: Any) -> torch.Tensor:
        ctx.told = told
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2, None


class Slotted:
    __slots__ = ("result",)


class Mine:
    """An object that a user stores in the metadata of a node."""


def cycle_through_an_input(told: Any) -> list[torch.Tensor]:
    x = torch.ones(3, requires_grad=True)
    y = Told.apply(x * W, told)
    if isinstance(told, dict):
        told["result"] = y
    else:
        told.result = y
    return [x, y]


def nested(reentrant: bool) -> list[torch.Tensor]:
    def inner(a: torch.Tensor) -> torch.Tensor:
        return (a * W).sin()

    def outer(a: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, a, use_reentrant=reentrant).cos()  # type: ignore[no-any-return]

    x = torch.ones(3, requires_grad=True)
    y = checkpoint(outer, x, use_reentrant=reentrant)
    y.sum().backward()
    return [x, y]


def watching_all() -> amanda.Tool:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: None)
    tool.add_inst_for_op(lambda context: None, backward=True)
    return tool


def inserting() -> amanda.Tool:
    tool = watching_all()

    def forward(context: Any) -> None:
        context.insert_before_op(lambda *values: None)
        context.insert_before_backward_op(lambda *grads: None)
        context.insert_after_backward_op(lambda *grads: None)

    def backward(context: Any) -> None:
        context.insert_before_backward_op(lambda *grads: None)

    tool.add_inst_for_op(forward)
    tool.add_inst_for_op(backward, backward=True)
    return tool


@pytest.mark.parametrize("tool", [watching_all, inserting])
@pytest.mark.parametrize(
    "program",
    [
        cycle,
        lambda: cycle_through_an_input({}),
        lambda: cycle_through_an_input(Slotted()),
        lambda: nested(True),
        lambda: nested(False),
    ],
    ids=["cycle", "dictionary", "slots", "reentrant", "not reentrant"],
)
def test_nothing_is_held_while_applied(program: Any, tool: Any) -> None:
    with amanda.apply(tool()):
        for _ in range(3):
            alive = [weakref.ref(tensor) for tensor in program()]
            W.grad = None
            gc.collect()
            assert [one() for one in alive] == [None] * len(alive)
            count = W._use_count()  # type: ignore[attr-defined]
            assert count == 1, "something holds the accumulation of its gradient"


@pytest.mark.parametrize("tool", [watching_all, inserting])
def test_metadata_of_a_node_goes_with_the_node(tool: Any) -> None:
    with amanda.apply(tool()):
        x = torch.ones(3, requires_grad=True)
        y = x.sin()
        kept = {"sin": Mine(), "leaf": Mine()}
        node: Any = y.grad_fn
        node.metadata["mine"] = kept["sin"]
        node.next_functions[0][0].metadata["mine"] = kept["leaf"]
        y.sum().backward()
        alive = [weakref.ref(one) for one in kept.values()]
        del x, y, node, kept
        # At once: without a run of the collector.
        assert [one() for one in alive] == [None, None]


class Loop:
    """A program's loop, in whose frame the driver looks for the module that runs."""

    def step(self, model: torch.nn.Module) -> bool:
        x = torch.ones(2, 3)
        seen = weakref.ref(x)
        model(x)
        torch.relu(x)
        del x
        return seen() is None

    def own_names(self, model: torch.nn.Module) -> list[str]:
        given = locals()
        del given["self"]
        model(torch.ones(2, 3))
        return list(given)


def test_variables_of_the_programs_functions() -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: None)
    with amanda.apply(tool):
        assert Loop().step(torch.nn.Linear(3, 3))
        assert Loop().own_names(torch.nn.Linear(3, 3)) == ["model"]
