"""Hooks that the extension puts into graphs itself: called like hooks that Python registers.

The oracle is the order and the values in the first execution, which Python hooks, and plain torch.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
import gc
import platform
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd as compiled
import torch.nn.functional as F

import amanda
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals import extension
from amanda_driver_torch.torch_internals.internals import BUILD
from amanda_driver_torch.torch_internals.versions import VARIABLE, are_hooks_tried

from .repeated_executions import TIMES
from .tensors import equal, leaf

native = extension.native
pytestmark = [
    pytest.mark.skipif(native is None, reason=extension.missing),
    pytest.mark.one_interceptor,
]


@pytest.fixture(autouse=True)
def _natively(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "native")


@pytest.fixture(params=["in the graph", "by Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a test with hooks in graphs, and as under a torch that keeps graphs in another way."""
    if request.param == "in the graph" and not are_hooks_tried(BUILD):
        pytest.skip("Python registers all hooks in graphs of this build")
    with amanda.apply(amanda.Tool()):
        assert native.knows_graphs() == are_hooks_tried(BUILD)
    if request.param == "by Python":
        native.forget_graphs()
        monkeypatch.setattr(native, "knows_graphs", lambda: True)  # So that it stays forgotten.
    yield request.param
    monkeypatch.undo()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads what glibc's malloc notes")
def test_a_node_has_as_many_words_as_are_searched() -> None:
    """`NODE` in graphs.cpp, for the nodes by which the extension learns how torch keeps them."""
    one, two = leaf(1).exp(), leaf(1).exp()
    for tensor in (one, two, one * two):
        seen = tensor.grad_fn  # Some releases free it as soon as Python does.
        node = ctypes.c_size_t.from_address(id(seen) + 16).value
        chunk = ctypes.c_size_t.from_address(node - 8).value & ~7
        # Its own header, before the memory, counts too.
        assert (48 + 1) * 8 <= chunk <= 4096


#: Place -> how a routine is inserted there.
PLACES: dict[str, Callable[[amanda.OpContext, Any], None]] = {
    "outputs": lambda context, routine: context.insert_before_backward_op(routine),
    "inputs": lambda context, routine: context.insert_after_backward_op(routine),
    "before node": lambda context, routine: context.insert_before_backward_op(routine),
    "after node": lambda context, routine: context.insert_after_backward_op(routine),
}


def tool_at(place: str, op_type: str, routine: Callable[..., Any]) -> amanda.Tool:
    tool = amanda.Tool()

    def forward(context: amanda.OpContext) -> None:
        if context.get_op().__name__ == op_type:
            PLACES[place](context, routine)

    def backward(context: amanda.OpContext) -> None:
        if context.forward is not None and context.forward.get_op().__name__ == op_type:
            PLACES[place](context, routine)

    if place.endswith("node"):
        tool.add_inst_for_op(backward, backward=True)
    else:
        tool.add_inst_for_op(forward)
    return tool


def numbers(values: tuple[Any, ...]) -> list[Any]:
    return [None if value is None else value.tolist() for value in values]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("place", PLACES)
def test_hooks_of_the_program_are_called_in_the_same_order(place: str) -> None:
    x, events = leaf(2, 3), list[Any]()

    def note(name: str) -> Callable[..., None]:
        return lambda *values: events.append(name)

    found = []
    with amanda.apply(tool_at(place, "relu", note("tool"))):
        for _ in range(TIMES):
            y = torch.relu(x)
            assert y.grad_fn is not None
            y.register_hook(note("tensor"))
            y.grad_fn.register_prehook(note("before"))
            y.grad_fn.register_hook(note("after"))
            y.register_hook(note("second tensor"))
            y.retain_grad()
            (y * 2).sum().backward()
            assert y.grad is not None
            assert (y.grad == 2).all()
            found.append([*events])
            events.clear()
    assert sorted(found[0]) == sorted(["tool", "tensor", "before", "after", "second tensor"])
    assert found[1:] == found[:1] * (TIMES - 1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3)], ids=str)
def test_every_execution_shows_the_same_gradients(place: str, shape: tuple[int, ...]) -> None:
    x, w, b = leaf(*shape), leaf(5, 3), leaf(5)
    seen: list[Any] = []
    found = []
    with amanda.apply(tool_at(place, "linear", lambda *values: seen.append(numbers(values)))):
        for _ in range(TIMES):
            F.linear(x, w, b).square().sum().backward()
            found.append([*seen])
            seen.clear()
    assert found[0] != []
    assert found[1:] == found[:1] * (TIMES - 1)


@pytest.mark.usefixtures("way")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # It reads intermediate ones.
@pytest.mark.parametrize("place", PLACES)
def test_compiled_autograd_calls_them_too(place: str) -> None:
    x, w, b, seen = leaf(2, 4, 3), leaf(5, 3), leaf(5), list[Any]()
    found = []
    with amanda.apply(tool_at(place, "linear", lambda *values: seen.append(numbers(values)))):
        for n in range(2 * TIMES):
            loss = F.linear(x, w, b).sum()
            if n % 2 == 0:
                loss.backward()
            else:
                with compiled._enable(lambda graph: graph):
                    loss.backward()
            found.append([*seen])
            seen.clear()
    assert found[0] != []
    assert found[1:] == found[:1] * (2 * TIMES - 1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("place", PLACES)
def test_a_gradient_that_is_changed_is_the_one_written_by_hand(place: str) -> None:
    x = leaf(2, 3)
    (plain,) = torch.autograd.grad(torch.relu(x).sum(), (x,))
    calls = 0

    def triple(grad: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        return grad * 3 if calls % 2 else None

    with amanda.apply(tool_at(place, "relu", triple)):
        for n in range(1, 2 * TIMES):
            (found,) = torch.autograd.grad(torch.relu(x).sum(), (x,))
            equal(found, plain * (3 if n % 2 else 1))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_a_routine_surfaces_with_its_origin(place: str) -> None:
    x, calls = leaf(2, 3), 0

    def fail(grad: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == TIMES:
            raise KeyError("mine")

    with amanda.apply(tool_at(place, "relu", fail)):
        for _ in range(TIMES - 1):
            torch.relu(x).sum().backward()
        with pytest.raises(KeyError, match="mine") as raised:
            torch.relu(x).sum().backward()
        assert "relu" in "".join(raised.value.__notes__)
        torch.relu(x).sum().backward()
    assert calls == TIMES + 1


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("place", PLACES)
def test_second_order_gradients_and_passes_that_are_repeated_are_plain(place: str) -> None:
    x, w = leaf(4, 3), leaf(5, 3)

    def program() -> tuple[torch.Tensor, ...]:
        loss = F.linear(x, w).square().sum()
        first = torch.autograd.grad(loss, (x, w), create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), (x, w), retain_graph=True)
        return (*first, *second, *torch.autograd.grad(loss, (x, w)))

    plain, calls = program(), list[int]()
    counts = []
    with amanda.apply(tool_at(place, "linear", lambda *values: calls.append(1))):
        for _ in range(TIMES):
            for value, expected in zip(program(), plain, strict=True):
                equal(value, expected)
            counts.append(len(calls))
            calls.clear()
    assert counts[-1] >= 2


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("place", PLACES)
def test_a_hook_holds_nothing_of_a_tool_that_is_gone(place: str) -> None:
    class Large:
        def __call__(self, *values: Any) -> None:
            pass

    x, routine = leaf(2, 3), Large()
    held = weakref.ref(routine)
    with amanda.apply(tool_at(place, "relu", routine)):
        for _ in range(TIMES):
            y = torch.relu(x)
            y.sum().backward(retain_graph=True)
    del routine
    gc.collect()
    assert held() is None
    with pytest.warns(UserWarning, match="Backward ran after"):
        y.sum().backward()


def test_a_kept_result_of_tools_that_ended_before_others_says_nothing() -> None:
    weight, outer, inner, calls = leaf(2, 3), amanda.Tool(), amanda.Tool(), []
    for tool in (outer, inner):

        def look(context: amanda.OpContext, tool: amanda.Tool = tool) -> None:
            context.insert_before_backward_op(lambda *_: calls.append(tool), observe=True)

        tool.add_inst_for_op(look, backward=True)
    with amanda.apply(outer):
        with amanda.apply(inner):
            kept = [(weight * 2).sum() for _ in range(TIMES)]
            for result in kept:
                result.backward(retain_graph=True)
        before = calls.count(inner)
        # Another graph, in which the node of the leaf is that of the first one.
        (weight * 3).sum().backward()
        assert calls.count(inner) == before > 0
        with pytest.warns(UserWarning, match="Backward ran after"):
            kept[0].backward()


def test_warm_executions_leave_nothing_of_python_on_tensors() -> None:
    x = leaf(2, 3)
    with amanda.apply(tool_at("outputs", "relu", lambda grad: None)):
        kept = []
        for _ in range(TIMES):
            y = torch.relu(x)
            y.sum().backward()
            kept.append(y._backward_hooks)
    assert kept[0] is not None
    assert kept[-1] is None


class Leaves(amanda.Tool):
    """Counts the accumulations into leaves, before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = self.after = 0
        self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "AccumulateGrad":
            context.insert_before_backward_op(self.count_before)
            context.insert_after_backward_op(self.count_after)

    def count_before(self, *values: Any) -> None:
        self.before += 1

    def count_after(self, *values: Any) -> None:
        self.after += 1

    def counts(self) -> tuple[int, int]:
        found = self.before, self.after
        self.before = self.after = 0
        return found


def node_of_leaf(w: torch.Tensor) -> Any:
    node = torch.relu(w).grad_fn
    assert node is not None
    return node.next_functions[0][0]


def accumulate(w: torch.Tensor) -> None:
    (torch.relu(w) * torch.exp(w)).sum().backward()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("held", [False, True], ids=["new node", "held node"])
def test_a_leaf_of_several_operators_is_seen_once_under_each_tool(held: bool) -> None:
    w, first, second = leaf(3), Leaves(), Leaves()
    node = node_of_leaf(w) if held else None
    with amanda.apply(first):
        for _ in range(TIMES):
            accumulate(w)
            assert first.counts() == (1, 1)
        with amanda.apply(second):
            for _ in range(TIMES):
                accumulate(w)
                assert (first.counts(), second.counts()) == ((1, 1), (1, 1))
        for _ in range(TIMES):
            accumulate(w)
            assert (first.counts(), second.counts()) == ((1, 1), (0, 0))
    accumulate(w)  # It warns of nothing.
    with amanda.apply(second):
        for _ in range(TIMES):
            accumulate(w)
            assert (first.counts(), second.counts()) == ((0, 0), (1, 1))
    accumulate(w)
    assert second.counts() == (0, 0)
    assert (node is not None) == held


@pytest.mark.usefixtures("way")
def test_hooks_of_the_program_on_a_leaf_do_not_double_those_of_a_tool() -> None:
    w, tool, calls = leaf(3), Leaves(), list[int]()
    node = node_of_leaf(w)
    with amanda.apply(tool):
        for n in range(2 * TIMES):
            if n == TIMES:
                node.register_hook(lambda *values: calls.append(1))
            accumulate(w)
            assert tool.counts() == (1, 1)
            assert len(calls) == max(0, n + 1 - TIMES)


def test_c_hooks_a_new_node_of_a_leaf(way: str) -> None:
    w, epochs = leaf(3), []
    with amanda.apply(Leaves()):
        life = STATE.attachment.backward.life  # type: ignore[union-attr]
        for _ in range(TIMES):
            y = torch.relu(w)
            assert y.grad_fn is not None
            epochs.append(native.leaf_epoch(y.grad_fn.next_functions[0][0], life))
            y.sum().backward()
            del y  # The next graph must have a new node.
        assert epochs[0] is None
        assert (epochs[-1] is not None) == (way == "in the graph")
