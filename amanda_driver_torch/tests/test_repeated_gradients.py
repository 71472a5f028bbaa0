"""Gradients in the second and later executions of an op, when its plan is run in its cached form.

The oracle is the plain program, with what a tool changes written into it by hand.
"""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import amanda
from amanda_core.errors import AmandaWarning, EditError

from .making import close, equal, leaf, tool

TIMES = 4


class Arriving(amanda.Tool):
    """Hands what arrives at the outputs of an op to a routine, with the number of the call."""

    def __init__(self, op_type: str, routine: Callable[[int, torch.Tensor], Any]) -> None:
        super().__init__()
        self.calls = 0
        self._op_type, self._routine = op_type, routine
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().__name__ == self._op_type:
            context.insert_before_backward_op(self.run, grad_outputs=[0])

    def run(self, grad: torch.Tensor) -> Any:
        self.calls += 1
        return self._routine(self.calls, grad)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    return leaf(4, 3), leaf(5, 3)


def test_each_execution_shows_its_own_gradient() -> None:
    x, w = data()
    seen: list[torch.Tensor] = []
    factors = [1.0, 2.0, 3.0, 4.0]
    with amanda.apply(Arriving("linear", lambda _, grad: seen.append(grad.clone()))):
        for factor in factors:
            (product(x, w) * factor).sum().backward()
    assert [grad[0, 0].item() for grad in seen] == factors


def test_edits_from_some_execution_on_are_those_written_by_hand() -> None:
    x, w = data()
    edit = Arriving("linear", lambda n, grad: grad * 10 if n > 2 else None)
    with amanda.apply(edit):
        for n in range(1, TIMES + 1):
            found = torch.autograd.grad(product(x, w).square().sum(), (x, w))
            output = product(x.detach(), w.detach())
            arriving = 2 * output * (10 if n > 2 else 1)
            equal(found[0], arriving @ w.detach())
            equal(found[1], arriving.T @ x.detach())
    assert edit.calls == TIMES


def test_several_routines_fold_from_where_one_changed_something() -> None:
    x, w = data()
    order: list[str] = []

    def note(name: str, factor: float | None) -> Callable[[int, torch.Tensor], Any]:
        def routine(n: int, grad: torch.Tensor) -> Any:
            order.append(f"{name}{grad[0, 0].item():g}")
            return grad * factor if factor and n > 2 else None

        return routine

    tools = [Arriving("linear", note(*each)) for each in (("a", None), ("b", 2.0), ("c", 3.0))]
    with amanda.apply(*tools):
        for n in range(1, TIMES + 1):
            order.clear()
            (found,) = torch.autograd.grad(product(x, w).sum(), (x,))
            assert order == (["a1", "b1", "c1"] if n <= 2 else ["a1", "b1", "c2"])
            equal(found, (6 if n > 2 else 1) * torch.ones(4, 5) @ w.detach())


def test_an_error_names_the_tool_and_the_next_run_works() -> None:
    x, w = data()

    def fail_third(n: int, grad: torch.Tensor) -> None:
        if n == 3:
            raise LookupError("mine")

    with amanda.apply(Arriving("linear", fail_third)) as _:
        for n in range(1, TIMES + 1):
            if n != 3:
                product(x, w).sum().backward()
                continue
            with pytest.raises(LookupError, match="mine") as caught:
                product(x, w).sum().backward()
            (note,) = caught.value.__notes__ if hasattr(caught.value, "__notes__") else ("run",)
            assert "run" in note


def test_a_wrong_gradient_is_an_error_of_the_tool() -> None:
    x, w = data()
    with amanda.apply(Arriving("linear", lambda n, grad: grad[:1] if n > 2 else None)):
        for _ in range(2):
            product(x, w).sum().backward()
        with pytest.raises(EditError, match="shape"):
            product(x, w).sum().backward()


def test_passes_with_create_graph_and_retained_graphs() -> None:
    x, w = data()
    edit = Arriving("linear", lambda n, grad: grad * 2)
    with amanda.apply(edit):
        for _ in range(TIMES):
            loss = product(x, w).pow(3).sum()
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            first.sum().backward(retain_graph=True)
            loss.backward()
    plain = product(x.detach(), w.detach())
    equal(first.detach(), 2 * 3 * plain.square() @ w.detach())
    # Once where `first` was made, once where the loss was differentiated; making `first` again
    # differentiable passes the op's output once more.
    assert edit.calls == 3 * TIMES


def test_left_between_forward_and_backward_warns_and_runs_nothing() -> None:
    x, w = data()
    watch = Arriving("linear", lambda n, grad: None)
    with amanda.apply(watch):
        for _ in range(TIMES):
            product(x, w).sum().backward()
        output = product(x, w).sum()
    with pytest.warns(AmandaWarning, match="after `apply` was left"):
        output.backward()
    assert watch.calls == TIMES


def test_another_tool_entered_before_backward_leaves_the_first_at_work() -> None:
    x, w = data()
    watch = Arriving("linear", lambda n, grad: None)
    with amanda.apply(watch):
        for _ in range(TIMES):
            output = product(x, w).sum()
            with amanda.apply(amanda.Tool("other")):
                output.backward()
    assert watch.calls == TIMES


def test_switched_off_at_backward_runs_nothing() -> None:
    x, w = data()
    watch = Arriving("linear", lambda n, grad: None)
    with amanda.apply(watch):
        for _ in range(TIMES):
            output = product(x, w).sum()
            with amanda.disabled():
                output.backward()
    assert watch.calls == 0


def test_executions_without_gradients_between_change_nothing() -> None:
    x, w = data()
    watch = Arriving("linear", lambda n, grad: None)
    with amanda.apply(watch):
        for _ in range(TIMES):
            with torch.no_grad():
                product(x, w)
            product(x, w.detach()).sum().backward()
            product(x.detach(), w.detach())
            product(x, w).sum().backward()
    assert watch.calls == 2 * TIMES


def test_hooks_of_the_user_on_the_same_tensor_run_after_the_op_s_own() -> None:
    x, w = data()
    order: list[str] = []
    with amanda.apply(Arriving("linear", lambda n, grad: order.append("tool"))):
        for _ in range(TIMES):
            output = product(x, w)
            handle = output.register_hook(lambda grad: order.append("user"))
            output.register_hook(lambda grad: order.append("other"))
            handle.remove()
            output.sum().backward()
    assert order == ["tool", "other"] * TIMES


def test_function_modes_of_the_user_hear_nothing_of_hooks() -> None:
    heard: list[str] = []

    class Hears(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            heard.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    x, w = data()
    watch = Arriving("linear", lambda n, grad: None)
    with amanda.apply(watch), Hears():
        for _ in range(TIMES):
            product(x, w)
    instrumented, heard = heard, []
    with Hears():
        for _ in range(TIMES):
            product(x, w)
    assert instrumented == heard


def test_an_output_that_is_the_input_has_no_gradient_of_its_own() -> None:
    x = leaf(4)
    watch = Arriving("dropout", lambda n, grad: None)
    with amanda.apply(watch):
        for _ in range(TIMES):
            F.dropout(x, training=False).sum().backward()
    assert watch.calls == 0


def test_graphs_die_with_their_tensors() -> None:
    x, w = data()
    kept: list[Any] = []

    class Keeps(Arriving):
        def analyse(self, context: amanda.OpContext) -> None:
            super().analyse(context)
            if context.get_op().__name__ == "linear":
                context.insert_after_op(self.keep)

        def keep(self, output: torch.Tensor) -> None:
            # A tool that holds the output, whose node has the hook, which must not hold the tool.
            kept[:] = [output]

    with amanda.apply(Keeps("linear", lambda n, grad: None)):
        for _ in range(TIMES):
            output = product(x, w)
        died = weakref.ref(output)
        kept.clear()
        del output
        gc.collect()
        assert died() is None
    watch = Arriving("linear", lambda n, grad: None)
    with amanda.apply(watch):
        kept += [product(x, w) for _ in range(TIMES)]
    ended = weakref.ref(watch)
    del watch
    gc.collect()
    assert ended() is None, "a graph that outlives the tools holds one of them"


class Given(Arriving):
    """The same with the gradient that the op gives to its second input, of all of its gradients."""

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().__name__ == self._op_type:
            context.insert_after_backward_op(self.second)

    def second(self, *grads: Any) -> Any:
        new = self.run(grads[1])
        return None if new is None else (grads[0], new, *grads[2:])


class Raw(Arriving):
    """The same with the gradient that reaches one of the op's nodes."""

    def __init__(self, op_type: str, routine: Callable[[int, torch.Tensor], Any]) -> None:
        super().__init__(op_type, routine)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        pass

    def analyse_backward(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ in ("AddmmBackward0", "MmBackward0"):
            context.insert_before_backward_op(self.run, grad_outputs=[0])


class RawResult(Raw):
    """The same with a result of that node, the gradient of the transposed weight."""

    def analyse_backward(self, context: amanda.OpContext) -> None:
        position = {"AddmmBackward0": 2, "MmBackward0": 1}.get(context.get_backward_op().__name__)
        if position is not None:
            context.insert_after_backward_op(self.run, grad_inputs=[position])


SHAPES = {"2-D": (4, 3), "3-D": (2, 2, 3), "4-D": (2, 1, 2, 3)}


@pytest.mark.parametrize("biased", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("kind", [Arriving, Given, Raw, RawResult])
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


@pytest.mark.parametrize("kind", [Given, Raw, RawResult])
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


@pytest.mark.parametrize("kind", [Given, Raw, RawResult])
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
    with pytest.warns(AmandaWarning, match="after `apply` was left"):
        output.backward()
    assert watch.calls == TIMES


@pytest.mark.parametrize("kind", [Arriving, Given, Raw, RawResult])
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


@pytest.mark.parametrize("kind", [Arriving, Given, Raw, RawResult])
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
