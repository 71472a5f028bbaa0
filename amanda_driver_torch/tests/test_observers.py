"""Observers: routines that only look, for which nothing of the autograd graph is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import amanda

X = torch.linspace(-1, 1, 24).reshape(4, 6)
Y = torch.linspace(-2, 1, 24).reshape(4, 6)

#: Operators whose gradients one node gives, and others that several nodes give in parts.
PROGRAMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mul": lambda x, y: x * y,
    "add": lambda x, y: torch.add(x, x) + y,
    "addmm": lambda x, y: torch.addmm(x @ y.t(), x, y.t()),
    "diff": lambda x, y: torch.diff(x) * y[:, 1:],
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y),
    "linear": lambda x, y: F.linear(x, y),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "scaled_dot_product_attention": lambda x, y: F.scaled_dot_product_attention(
        x[None, None], y[None, None], x[None, None]
    ),
    "relu_": lambda x, y: (x * y).relu_() * x,
    "split": lambda x, y: torch.cat([part * 2 for part in x.split(2)]) * y,  # type: ignore[no-untyped-call]
}


def nodes_of(tensor: torch.Tensor) -> list[str]:
    """Return the names of the nodes after a tensor."""
    found, waiting = [], [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None:
            found.append(node.name())
            waiting += [inner for inner, _ in node.next_functions]
    return found


class Everywhere(amanda.Tool):
    """Observes all values and gradients of forward and backward ops."""

    def __init__(self, observe: bool) -> None:
        super().__init__()
        self.observe = observe
        self.seen: list[tuple[str, str, tuple[int, ...], float]] = []
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        """Observe an op."""
        for ask, what in (
            (context.insert_before_op, "inputs"),
            (context.insert_after_op, "outputs"),
            (context.insert_before_backward_op, "grad_outputs"),
            (context.insert_after_backward_op, "grad_inputs"),
        ):
            key = f"{context.op_type} {what}"
            ask(lambda *values, key=key: self.look(key, *values), observe=self.observe)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        """Observe a backward op."""
        context.insert_before_backward_op(lambda *values: None, observe=self.observe)
        context.insert_after_backward_op(lambda *values: None, observe=self.observe)

    def look(self, key: str, *values: Any) -> None:
        """Store the values."""
        for position, value in enumerate(values):
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(item, torch.Tensor):
                    shape = tuple(item.shape)
                    self.seen.append((key, str(position), shape, float(item.detach().sum())))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_graph_is_the_plain_one(name: str) -> None:
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    plain = PROGRAMS[name](x, y)
    expected = torch.autograd.grad(plain.square().sum(), [x, y])
    tool = Everywhere(observe=True)
    for _ in range(3):  # The second time the native interceptor runs it by itself.
        with amanda.apply(tool):
            found = PROGRAMS[name](x, y)
            assert nodes_of(found) == nodes_of(plain)
            gradients = torch.autograd.grad(found.square().sum(), [x, y])
        assert torch.equal(found, plain)
        assert all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("name", ["diff", "cosine_similarity", "einsum", "linear", "mul", "split"])
def test_observers_see_what_edits_see(name: str) -> None:
    def seen(observe: bool) -> list[Any]:
        tool = Everywhere(observe)
        x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
        for _ in range(3):
            with amanda.apply(tool):
                PROGRAMS[name](x, y).square().sum().backward()  # type: ignore[no-untyped-call]
        return sorted((*key, round(value, 3)) for *key, value in tool.seen)

    assert seen(True) == seen(False)


def test_what_cannot_be_seen_is_in_the_coverage() -> None:
    """One tensor is at several positions, and several nodes compute its gradient."""
    x = X.clone().requires_grad_()
    tool = Everywhere(observe=True)
    with amanda.apply(tool) as session:
        F.cosine_similarity(x, x).sum().backward()  # type: ignore[no-untyped-call]
        gaps = session.coverage()["pytorch"]
    assert any("cosine_similarity" in gap.what for gap in gaps)


def test_an_observer_that_returns_something_is_refused() -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(torch.neg, observe=True))
    for _ in range(2):
        with (
            amanda.apply(tool),
            pytest.raises(amanda.AmandaError, match=r"\[observer-result\]"),
        ):
            X * Y
