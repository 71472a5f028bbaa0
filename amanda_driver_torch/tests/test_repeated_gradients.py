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
from amanda_core.errors import EditError

from .repeated_executions import TIMES, Arriving, data, product
from .tensors import equal, leaf


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


class AtInputs(amanda.Tool):
    """Keeps the gradients of some inputs of an op."""

    def __init__(self, op_type: str, positions: list[int] | None) -> None:
        super().__init__()
        self.seen: list[Any] = []

        def analyse(context: amanda.OpContext) -> None:
            if context.get_op().__name__ == op_type:
                context.insert_after_backward_op(self.keep, grad_inputs=positions)

        self.add_inst_for_op(analyse)

    def keep(self, *grads: Any) -> None:
        self.seen.append([grad.clone() for grad in grads if grad is not None])


@pytest.mark.parametrize("before", [(), (1,) * 6, (1,) * 7, (1,) * 9])
@pytest.mark.parametrize("positions", [None, [0], [1], [2, 0]])
def test_inputs_of_any_number_of_dimensions(
    before: tuple[int, ...], positions: list[int] | None
) -> None:
    x, w, b = leaf(*before, 2, 3), leaf(4, 3), leaf(4)
    tool = AtInputs("linear", positions)
    with amanda.apply(tool):
        for _ in range(TIMES):
            F.linear(x, w, b).square().sum().backward()
            x.grad = w.grad = b.grad = None
    plain = torch.autograd.grad(F.linear(x, w, b).square().sum(), (x, w, b))
    assert len(tool.seen) == TIMES
    for seen in tool.seen:
        equal(seen, [plain[position] for position in positions or (0, 1, 2)])


def test_a_single_node_serves_inputs_of_every_layout() -> None:
    inputs = [
        *(torch.randn(2, 3, 4) for _ in range(TIMES)),
        torch.randn(4, 3, 2).transpose(0, 2),
        torch.randn(5),
        torch.randn(()),
        torch.randn(1, 2, 3, 4, 5).double(),
        torch.randn(2, 1, 4).expand(2, 3, 4),
        torch.randn(3, 4).to_sparse(),
        torch.randn(2, 3, 4),
    ]
    factors = [torch.randn(one.shape, dtype=one.dtype) for one in inputs]
    tool = AtInputs("neg", None)
    with amanda.apply(tool):
        for one, factor in zip(inputs, factors, strict=True):
            result = torch.neg(one.detach().requires_grad_())
            result.backward(factor.to_sparse() if result.is_sparse else factor)
    assert len(tool.seen) == len(inputs)
    for one, factor, (seen,) in zip(inputs, factors, tool.seen, strict=True):
        x = one.detach().requires_grad_()
        result = torch.neg(x)
        given = factor.to_sparse() if result.is_sparse else factor
        (expected,) = torch.autograd.grad(result, x, given)
        equal(seen, expected)


class OfOperands(amanda.Tool):
    """Multiplies the gradients of what `einsum` gets, and keeps them as they were."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.seen: list[list[torch.Tensor]] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().__name__ == "einsum":
            context.insert_after_backward_op(self.keep, grad_inputs=[1])

    def keep(self, grads: list[torch.Tensor]) -> list[torch.Tensor] | None:
        self.seen.append([grad.clone() for grad in grads])
        return None if self.factor == 1 else [grad * self.factor for grad in grads]


Contraction = tuple[str, list[tuple[int, ...]]]


def contracted_under(tool: OfOperands, calls: list[Contraction]) -> None:
    """Check einsums, called at one place of the program, by the same without tools."""
    made = []
    with amanda.apply(tool):
        for equation, shapes in calls:
            operands = [leaf(*shape) for shape in shapes]
            result = torch.einsum(equation, *operands)
            weights = torch.randn(result.shape)
            (result * weights).sum().backward()
            made.append((equation, operands, result, weights))
    assert len(tool.seen) == len(calls)
    for (equation, operands, result, weights), seen in zip(made, tool.seen, strict=True):
        plain = torch.einsum(equation, *operands)
        assert nodes_behind(result) == nodes_behind(plain)
        expected = torch.autograd.grad((plain * weights).sum(), operands)
        equal(seen, list(expected))
        equal([operand.grad for operand in operands], [grad * tool.factor for grad in expected])


def nodes_behind(tensor: torch.Tensor) -> list[str]:
    """Return the names of all nodes that lead to a tensor."""
    nodes: list[Any] = [tensor.grad_fn]
    for node in nodes:
        nodes += [following for following, _ in node.next_functions if following is not None]
    return [node.name() for node in nodes]


CONTRACTIONS: dict[str, list[tuple[int, ...]]] = {
    "bij,jk->bik": [(2, 3, 4), (4, 5)],
    "bij,kj->bik": [(2, 3, 4), (5, 4)],
    "bqhd,bkhd->bhqk": [(2, 3, 4, 5), (2, 6, 4, 5)],
    "bhqk,bkhd->bqhd": [(2, 4, 3, 6), (2, 6, 4, 5)],
    "i,j->ij": [(3,), (4,)],
    "bij->jbi": [(2, 3, 4)],
    "bij,b->ji": [(2, 3, 4), (2,)],
    "ijb,b->bij": [(2, 1, 4), (4,)],
}


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("equation", CONTRACTIONS)
def test_inputs_whose_dimensions_the_op_permutes(equation: str, factor: float) -> None:
    contracted_under(OfOperands(factor), [(equation, CONTRACTIONS[equation])] * TIMES)


@pytest.mark.parametrize(
    "calls",
    [
        # Dimensions are summed, or not, depending on what has size one.
        [("abij,abjk->abik", [(2, 3, 4, 5), sizes]) for sizes in [(2, 3, 5, 6), (1, 3, 5, 6)]],
        [("abij,abjk->abik", [(2, 3, 4, 5), sizes]) for sizes in [(2, 3, 5, 6), (2, 1, 5, 6)]],
        [("bij,bjk->bik", [(2, 3, 4), sizes]) for sizes in [(1, 4, 5), (2, 4, 5), (2, 4, 1)]],
        [("bij,bjk->bik", [(n, 3, 4), (n, 4, 5)]) for n in [2, 7]],
        [(equation, [(3, 3, 3), (3, 3, 3)]) for equation in ["abc,abd->cd", "cab,bda->cd"]],
        [(equation, [(3, 3), (3, 3)]) for equation in ["ij,jk->ik", "ji,jk->ki"]],
    ],
)
def test_permutations_that_change(calls: list[Contraction]) -> None:
    contracted_under(OfOperands(2.0), [call for call in [*calls, *calls[:1]] for _ in range(TIMES)])


def test_a_list_of_dimensions_that_changes() -> None:
    tool, dims, made = AtInputs("tensordot", [0, 1]), ([0], [1]), []
    with amanda.apply(tool):
        for first, second in [(1, 0)] * TIMES + [(0, 1)] * TIMES + [(1, 1)]:
            dims[0][0], dims[1][0] = first, second
            x, y = leaf(3, 3), leaf(3, 3)
            torch.tensordot(x * 1, y * 1, dims).square().sum().backward()
            made.append(([first], [second], x, y))
    assert len(tool.seen) == len(made)
    for (one, two, x, y), seen in zip(made, tool.seen, strict=True):
        plain = torch.tensordot(x, y, (one, two)).square().sum()
        equal(seen, list(torch.autograd.grad(plain, (x, y))))


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
