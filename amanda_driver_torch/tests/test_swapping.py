"""Tensors that exchange their content, which torch refuses while they have weak references."""

# mypy: allow-untyped-calls

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import swap_tensors

import amanda
from amanda_core.testing.kit.tools import watching

from .tensors import equal


def everywhere(seen: list[tuple[str, int]]) -> amanda.Tool:
    """Return a tool with an observer at each of the four points."""
    tool = amanda.Tool()

    def look(context: Any, *_: Any) -> None:
        seen.append((context.name, context.get_op_id()))

    def before(context: Any) -> None:
        context.insert_before_op(lambda *v: look(context))
        context.insert_before_backward_op(lambda *g: None)
        context.insert_after_backward_op(lambda *g: None)

    def after(context: Any) -> None:
        context.insert_after_op(lambda *v: None)

    def before_backward(context: Any) -> None:
        context.insert_before_backward_op(lambda *g: None)

    tool.add_inst_for_op(before)
    tool.add_inst_for_op(after, require_outputs=True)
    tool.add_inst_for_op(before_backward, backward=True)
    tool.add_inst_for_op(lambda context: None, backward=True, require_outputs=True)
    return tool


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def train(net: nn.Module, x: torch.Tensor) -> None:
    net(x).square().sum().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    net.zero_grad()


def linears(seen: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the linear operators seen since the last call."""
    found = [one for one in seen if "linear" in one[0]]
    seen.clear()
    assert found
    return found


@pytest.fixture(params=[False, True], ids=["setting data", "swapping"])
def conversion(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


X = torch.randn(5, 3)


@pytest.mark.usefixtures("conversion")
def test_conversion_of_a_module() -> None:
    seen: list[tuple[str, int]] = []
    net = network()
    plain = copy.deepcopy(net)
    with amanda.apply(everywhere(seen)):
        train(net, X)
        first = linears(seen)
        parameters = list(net.parameters())
        net.double()
        assert [id(p) for p in net.parameters()] == [id(p) for p in parameters]
        train(net, X.double())
        assert linears(seen) == first
    train(plain, X)
    train(plain.double(), X.double())
    equal(list(net.parameters()), list(plain.parameters()))
    net.float()
    train(net, X)


@pytest.mark.usefixtures("conversion")
def test_conversion_after_the_tools_were_left_and_applied_again() -> None:
    seen: list[tuple[str, int]] = []
    tool, net = everywhere(seen), network()
    with amanda.apply(tool):
        train(net, X)
    first = linears(seen)
    net.double()
    with amanda.apply(tool):
        train(net, X.double())
    assert linears(seen) == first


def test_weights_outside_of_modules() -> None:
    v, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    other = torch.randn(3, 3, requires_grad=True)
    seen: list[tuple[str, int]] = []

    def run() -> list[tuple[str, int]]:
        seen.clear()
        for weight in (v, w):
            F.linear(X, weight).sum().backward()
        return list(seen)

    tool = everywhere(seen)
    with amanda.apply(tool):
        first = run()
        assert len({op_id for name, op_id in first if "linear" in name}) == 2
        values = v.detach().clone(), w.detach().clone()
        swap_tensors(v, w)  # Early bound.
        equal((w.detach(), v.detach()), values)
        assert run() == first
        swap_tensors(v, other)
        assert run() == first
    assert not weakref.getweakrefs(v)
    with amanda.apply(tool):
        assert run() == first, "not the same ops when resumed"
    swap_tensors(v, w)


def test_weight_references_of_the_users_still_block() -> None:
    v, w = torch.ones(3), torch.zeros(3)
    held = weakref.ref(v)
    with amanda.apply(everywhere([])):
        torch.add(v, w)
        with pytest.raises(RuntimeError, match="weakref"):
            swap_tensors(v, w)
    assert held() is v


def test_nothing_refers_to_any_tensor_afterwards() -> None:
    """We keep no weak reference to any live tensor, whatever ran."""
    net, seen = network(), list[tuple[str, int]]()
    w = torch.randn(3, 3, requires_grad=True)
    kept: list[Any] = [w]
    before = {id(o): len(weakref.getweakrefs(o)) for o in gc.get_objects() if _is_tensor(o)}
    handle = amanda.attach(everywhere(seen))
    kept += [net(X), F.linear(X, w), torch.stack([w, w]), w[1:], w.sum()]
    for value in kept[1:]:
        value.sum().backward()
    inside = amanda.attach(watching()[1])
    kept.append(net(X))
    inside.remove()
    handle.remove()
    assert seen
    left = [
        o
        for o in gc.get_objects()
        if _is_tensor(o) and len(weakref.getweakrefs(o)) > before.get(id(o), 0)
    ]
    assert left == []


def _is_tensor(value: object) -> bool:
    return issubclass(type(value), torch.Tensor)


def test_swap_is_restored() -> None:
    code = swap_tensors.__code__
    with amanda.apply(amanda.Tool()):
        assert swap_tensors.__code__ is not code
    assert swap_tensors.__code__ is code


def test_a_parameter_exchanged_for_another_is_another() -> None:
    """The dead parameter's context is dropped, even if contents were swapped."""
    seen: list[tuple[str, int]] = []
    net, contexts = nn.Linear(3, 3), list[Any]()
    tool = amanda.Tool()
    tool.add_inst_for_op(contexts.append)
    with amanda.apply(tool, everywhere(seen)):
        net(X)
        swap_tensors(net.weight, nn.Parameter(torch.randn(3, 3)))
        net(X)
        assert sum(c.op_type == "linear" for c in contexts) == 1
        net.weight = nn.Parameter(torch.randn(3, 3))
        gc.collect()
        net(X)
        assert sum(c.op_type == "linear" for c in contexts) == 2
