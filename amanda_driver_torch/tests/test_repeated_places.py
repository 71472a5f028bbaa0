"""Each place of an op's gradients, in executions in which the plan is run in its cached form.

The oracle is the plain program, with what a tool changes written into it by hand.
"""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amanda
from amanda_core.errors import AmandaWarning
from amanda_core.testing.kit.tools import tool

from .repeated_executions import TIMES, Arriving, Given, Raw, RawResult, data, product
from .tensors import close, equal, leaf

PLACES = [Arriving, Given, Raw, RawResult]
SHAPES = {"2-D": (4, 3), "3-D": (2, 2, 3), "4-D": (2, 1, 2, 3)}


@pytest.mark.parametrize("biased", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", PLACES)
def test_edits_at_each_place_are_those_written_by_hand(
    kind: type[Arriving], shape: tuple[int, ...], biased: bool
) -> None:
    x, w, b = leaf(*shape), leaf(5, 3), leaf(5)
    inputs = (x, w, b) if biased else (x, w)
    edit = kind("linear", lambda n, grad: grad * 10 if n > 2 else None)
    with amanda.apply(edit):
        for n in range(1, TIMES + 1):
            factor = float(n)
            found = torch.autograd.grad((F.linear(*inputs) * factor).sum(), inputs)
            arriving = torch.full((x.numel() // 3, 5), factor)
            scale = 10 if n > 2 else 1
            at_weight = scale if kind in (Given, RawResult) else 1
            above = scale if kind in (Arriving, Raw) else 1
            close(found[0], (above * arriving @ w.detach()).view(shape))
            close(found[1], at_weight * (above * arriving).T @ x.detach().view(-1, 3))
            if biased:
                close(found[2], (above * arriving).sum(0))
    assert edit.calls == TIMES


@pytest.mark.parametrize("kind", PLACES)
def test_errors_at_each_place_name_the_tool_and_the_next_run_works(kind: type[Arriving]) -> None:
    x, w = data()

    def fail_third(n: int, grad: torch.Tensor) -> None:
        if n == 3:
            raise LookupError("mine")

    tool = kind("linear", fail_third)
    with amanda.apply(tool):
        for n in range(1, TIMES + 1):
            if n != 3:
                product(x, w).sum().backward()
                continue
            with pytest.raises(LookupError, match="mine") as caught:
                product(x, w).sum().backward()
            assert any(
                kind.__name__ in note
                for note in getattr(caught.value, "__notes__", [kind.__name__])
            )
    assert tool.calls == TIMES


@pytest.mark.parametrize("kind", PLACES)
def test_each_place_when_tools_come_and_go(kind: type[Arriving]) -> None:
    x, w = data()
    watch = kind("linear", lambda n, grad: None)
    with amanda.apply(watch):
        for _ in range(TIMES):
            output = product(x, w).sum()
            with amanda.apply(amanda.Tool("other")):
                output.backward(retain_graph=True)
            with amanda.disabled():
                output.backward()
            with torch.no_grad():
                product(x, w)
        assert watch.calls == TIMES
        output = product(x, w).sum()
    with pytest.warns(AmandaWarning, match="after `apply` ended"):
        output.backward()
    assert watch.calls == TIMES


@pytest.mark.parametrize("kind", PLACES)
def test_a_graph_that_outlives_the_tools_holds_none(kind: type[Arriving]) -> None:
    x, w = data()
    watch = kind("linear", lambda n, grad: None)
    kept = []
    with amanda.apply(watch):
        for _ in range(TIMES):
            kept.append(product(x, w))
            kept[-1].sum().backward(retain_graph=True)
    ended = weakref.ref(watch)
    del watch
    gc.collect()
    assert ended() is None


@pytest.mark.parametrize("kind", PLACES)
def test_gradients_of_gradients_at_each_place(kind: type[Arriving]) -> None:
    x, w = data()

    def third_order() -> list[torch.Tensor]:
        loss = product(x, w).pow(3).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        return [first.detach(), *torch.autograd.grad(first.square().sum(), (x, w))]

    expected = third_order()
    with amanda.apply(kind("linear", lambda n, grad: grad)):
        for _ in range(TIMES):
            product(x, w).sum().backward()
        for _ in range(TIMES):
            for found, value in zip(third_order(), expected, strict=True):
                equal(found, value)


def test_inputs_that_lie_otherwise_make_other_nodes_and_are_seen() -> None:
    w, b = leaf(5, 3), leaf(5)
    made = {
        "3-D": lambda: leaf(2, 4, 3),
        "2-D": lambda: leaf(4, 3),
        "transposed": lambda: leaf(3, 4, 2).transpose(0, 2),
        "strided": lambda: leaf(2, 4, 6)[..., ::2],
        "double": lambda: leaf(2, 4, 3).double().float(),
    }
    edit = Given("linear", lambda n, grad: grad * 2)
    with amanda.apply(edit):
        for _ in range(2):
            for make in made.values():
                for _ in range(3):
                    x = make()
                    found = torch.autograd.grad(F.linear(x, w, b).square().sum(), (w, b))
                    with amanda.disabled():
                        plain = torch.autograd.grad(F.linear(x, w, b).square().sum(), (w, b))
                    equal(found[0], 2 * plain[0])
                    equal(found[1], plain[1])


def test_casts_of_autocast_stand_between() -> None:
    x, w = data()
    edit = Given("linear", lambda n, grad: grad * 2)

    def gradient(cast: bool) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            output = product(x, w)
        return torch.autograd.grad(output.float().sum(), w)[0]

    plain = {cast: gradient(cast) for cast in (False, True)}
    with amanda.apply(edit):
        for cast in (False, False, False, True, True, False, True):
            equal(gradient(cast), 2 * plain[cast])


def test_broadcast_inputs_of_one_node() -> None:
    x, y = leaf(4, 3), leaf(3)
    seen: list[torch.Size] = []

    def scale(n: int, grad: torch.Tensor) -> Any:
        seen.append(grad.shape)
        return grad * n if n > 2 else None

    edit = Given("add", scale)
    with amanda.apply(edit):
        for n in range(1, TIMES + 1):
            found = torch.autograd.grad(torch.add(x, y).square().sum(), (x, y))
            arriving = 2 * (x + y).detach()
            equal(found[0], arriving)
            equal(found[1], arriving.sum(0) * (n if n > 2 else 1))
    assert seen == [y.shape] * TIMES


def test_gradient_of_one_input_alone() -> None:
    x, w = data()
    watch = Given("linear", lambda n, grad: None)
    seen: list[int] = []

    class All(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            if context.get_op().__name__ == "linear":
                context.insert_after_backward_op(self.see)

        def see(self, *grads: Any) -> None:
            seen.append(sum(grad is not None for grad in grads))

    with amanda.apply(watch, All()):
        for _ in range(TIMES):
            (found,) = torch.autograd.grad(product(x, w).sum(), w)
            equal(found, torch.ones(4, 5).T @ x.detach())
    assert len(seen) == TIMES


def test_a_raw_routine_sees_its_context() -> None:
    x, w = data()
    seen: list[Any] = []

    class Looks(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.analyse, backward=True)

        def analyse(self, context: amanda.OpContext) -> None:
            if context.get_backward_op().__name__ == "MmBackward0":
                context.insert_before_backward_op(self.look, context=context)
                context.insert_after_backward_op(self.look_again, context=context)

        def look(self, grad: torch.Tensor, context: amanda.OpContext) -> None:
            op = context.get_backward_op()
            assert op.node is not None
            assert len(op.next_functions) == 2
            assert context.get_grad_outputs()[0] is grad
            seen.append(context.get_inputs()[1] is w)

        def look_again(self, *results: torch.Tensor, context: amanda.OpContext) -> None:
            assert list(context.get_grad_inputs()) == list(results)
            assert len(context.get_grad_outputs()) == 1

    with amanda.apply(Looks()):
        for _ in range(TIMES):
            product(x, w).sum().backward()
    assert seen == [True] * TIMES


def test_gradients_of_outputs_and_inputs_of_one_op() -> None:
    x, w = data()
    seen: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(lambda *g: seen.append("arrives"), grad_outputs=[0])
        context.insert_after_backward_op(lambda *g: seen.append("given"), grad_inputs=[1])

    with amanda.apply(tool(analyse, "linear")):
        for _ in range(TIMES):
            product(x, w).sum().backward()
    assert seen == ["arrives", "given"] * TIMES


@pytest.mark.parametrize("late", [False, True])
def test_a_weight_that_autocast_casts_once_for_two_operators(late: bool) -> None:
    """An observer gets what each contributes, as if each had a weight of its own."""
    layer, copy = nn.Linear(4, 4), nn.Linear(4, 4)
    copy.load_state_dict(layer.state_dict())
    x, found = torch.randn(3, 4), list[torch.Tensor]()

    def run(first: nn.Module, second: nn.Module) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = second(first(x))
        output.float().sum().backward()

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "linear":
            context.insert_after_backward_op(found.append, grad_inputs=[1], observe=True)

    def gradients(*modules: nn.Linear) -> list[torch.Tensor]:
        """Return those of the weights of two modules, of which the second is called first."""
        run(modules[1], modules[0])
        found = [module.weight.grad for module in modules]
        for module in modules:
            module.weight.grad = None
        return [gradient for gradient in found if gradient is not None]

    plain = gradients(layer, layer)
    tool = amanda.Tool()
    tool.add_inst_for_op(analyse, require_outputs=late)
    with amanda.apply(tool):
        for _ in range(3):
            equal(gradients(layer, layer), plain)
    equal(found, gradients(copy, layer) * 3)
    assert found[0].dtype == torch.float32
