"""The aligned view: gradients by the positions of the forward op, whatever its backward is made of.

The oracle is `torch.autograd.grad` on a plain program in which each use of an op has inputs of its
own.
The module is long because it is a list of cases.
"""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amanda
from amanda_core.errors import EditError, UnsupportedError
from amanda_core.testing.kit.tools import at_inputs, at_outputs, tool

from .tensors import close, equal, grad_of, leaf, leaf_copy

LATE = pytest.mark.parametrize("late", [False, True], ids=["asked-before", "asked-after"])


class Gradients(dict[int, Any]):
    """Copies of the gradients that arrived at each position."""

    def inputs(self, op_type: str, *positions: int, late: bool = False) -> amanda.Tool:
        def analyse(context: amanda.OpContext) -> None:
            for position in positions:
                keep = self._keeping(position)
                context.insert_after_backward_op(keep, grad_inputs=[position])

        return tool(analyse, op_type, require_outputs=late)

    def outputs(self, op_type: str, *positions: int, late: bool = False) -> amanda.Tool:
        def analyse(context: amanda.OpContext) -> None:
            for position in positions:
                keep = self._keeping(position)
                context.insert_before_backward_op(keep, grad_outputs=[position])

        return tool(analyse, op_type, require_outputs=late)

    def _keeping(self, position: int) -> Callable[[Any], None]:
        def keep(grad: Any) -> None:
            assert position not in self, "called twice"
            listed = isinstance(grad, (list, tuple))
            self[position] = [g.clone() for g in grad] if listed else grad.clone()

        return keep


def expected(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[Any]:
    """Return the gradients of the sum of squares of a plain program's output."""
    leaves = [leaf_copy(tensor) for tensor in inputs]
    return list(torch.autograd.grad(function(*leaves).square().sum(), leaves))


# Values.


@LATE
def test_gradient_at_an_output_is_the_whole_one_arriving(late: bool) -> None:
    x, got = leaf(3), Gradients()
    with amanda.apply(got.outputs("exp", 0, late=late)):
        y = torch.exp(x)
        (y.sin() + y * y).sum().backward()
    y = y.detach()
    close(got[0], y.cos() + 2 * y)


@LATE
@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3)], ids=["2-D", "3-D"])
def test_gradients_at_the_inputs_of_linear(shape: tuple[int, ...], late: bool) -> None:
    layer, x, got = nn.Linear(3, 2), leaf(*shape), Gradients()
    with amanda.apply(got.inputs("linear", 0, 1, 2, late=late)):
        layer(x).square().sum().backward()
    close([got[0], got[1], got[2]], expected(F.linear, x, layer.weight, layer.bias))


BROADCAST: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
}


@LATE
@pytest.mark.parametrize("op_type", BROADCAST)
def test_broadcast_input_has_a_gradient_of_its_own_shape(op_type: str, late: bool) -> None:
    a, b, got = leaf(4, 3), leaf(3), Gradients()
    with amanda.apply(got.inputs(op_type, 0, 1, late=late)):
        BROADCAST[op_type](a, b).square().sum().backward()
    assert got[1].shape == (3,)
    close([got[0], got[1]], expected(BROADCAST[op_type], a, b))
    close([grad_of(a), grad_of(b)], [got[0], got[1]])


@LATE
def test_same_tensor_at_two_positions_has_two_contributions(late: bool) -> None:
    x, got = leaf(3), Gradients()
    with amanda.apply(got.inputs("mul", 0, 1, late=late)):
        (x * x).sum().backward()
    equal([got[0], got[1]], [x.detach()] * 2)
    equal(grad_of(x), 2 * x.detach())


def test_same_tensor_three_times_in_an_op_of_many_nodes() -> None:
    q, got = leaf(1, 2, 4, 8), Gradients()
    with amanda.apply(got.inputs("scaled_dot_product_attention", 0, 1, 2)):
        F.scaled_dot_product_attention(q, q, q).square().sum().backward()
    close([got[0], got[1], got[2]], expected(F.scaled_dot_product_attention, q, q, q))


#: Operators of several nodes, whose order is not that of the arguments.
OF_MANY_NODES: dict[str, Callable[..., torch.Tensor]] = {
    "linear": F.linear,
    "matmul": lambda x, y: torch.matmul(x[None], y),
    "tensordot": lambda x, y: torch.tensordot(x, y, 1),
    "kron": torch.kron,
    "cosine_similarity": F.cosine_similarity,
    "pairwise_distance": lambda x, y: F.pairwise_distance(x, y),
    "bilinear": lambda x, y: F.bilinear(x, y, torch.ones(1, 3, 3)),
    "inner": torch.inner,
    "trapezoid": lambda x, y: torch.trapezoid(x, x=y),
    "kl_div": lambda x, y: F.kl_div(x, y, reduction="sum"),
    "poisson_nll_loss": lambda x, y: F.poisson_nll_loss(x, y, full=True),
}


@pytest.mark.parametrize("edit", ["none", "before", "gradient", "both"])
@pytest.mark.parametrize("name", OF_MANY_NODES)
def test_positions_of_one_tensor_in_an_op_of_many_nodes(name: str, edit: str) -> None:
    function = OF_MANY_NODES[name]
    value, weight = torch.rand(3, 3) + 0.1, torch.rand(3, 3)
    factor = 3.0 if edit in ("gradient", "both") else 1.0
    seen: list[list[torch.Tensor]] = []

    def analyse(context: amanda.OpContext) -> None:
        if edit in ("before", "both"):
            context.insert_before_op(lambda y: y * weight, inputs=[1])
        context.insert_after_backward_op(scale, grad_inputs=[1])

    def scale(grad: torch.Tensor) -> torch.Tensor:
        seen[-1].append(grad.clone())
        return grad * factor

    def program(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        out = function(one, other)
        return (out * torch.arange(1.0, 1 + out.numel()).view(out.shape)).sum()

    first, other = (
        leaf_copy(value),
        leaf_copy(value * weight if edit in ("before", "both") else value),
    )
    program(first, other).backward()
    assert first.grad is not None
    assert other.grad is not None
    with amanda.apply(tool(analyse, name)):
        for _ in range(4):
            seen.append([])
            x = leaf_copy(value)
            program(x, x).backward()
            for grad in seen[-1]:
                close(grad, other.grad)
            close(grad_of(x), first.grad + factor * other.grad)
            assert len(seen[-1]) == 1


@pytest.mark.parametrize("name", OF_MANY_NODES)
def test_observers_are_not_shown_sums_of_positions(name: str) -> None:
    """An observer changes nothing, so what the nodes do not tell apart is not shown."""
    function, value, got = OF_MANY_NODES[name], torch.rand(3, 3) + 0.1, Gradients()

    def analyse(context: amanda.OpContext) -> None:
        for position in range(2):
            keep = got._keeping(position)
            context.insert_after_backward_op(keep, grad_inputs=[position], observe=True)

    with amanda.apply(tool(analyse, name)) as session:
        x = leaf_copy(value)
        function(x, x).square().sum().backward()
        gaps = [gap.what for gap in session.coverage()["pytorch"] if name in gap.what]
    wanted = expected(function, value, value)
    for position in range(2):
        if position in got:
            close(got[position].view(3, 3), wanted[position])
        else:
            assert any(f"inputs [{position}]" in gap for gap in gaps)


@LATE
def test_contribution_is_that_of_this_op_alone(late: bool) -> None:
    x, got = leaf(3), Gradients()
    with amanda.apply(got.inputs("exp", 0, late=late)):
        h = x * 2
        (h.exp() + h.sin()).sum().backward()
    equal(got[0], (x.detach() * 2).exp())
    close(grad_of(x), 2 * ((x * 2).exp() + (x * 2).cos()).detach())


@LATE
def test_list_of_inputs_is_one_position(late: bool) -> None:
    a, b, got = leaf(2), leaf(2), Gradients()
    with amanda.apply(got.inputs("cat", 0, late=late)):
        (torch.cat([a, b]) * torch.arange(4.0)).sum().backward()
    equal(got[0], [torch.tensor([0.0, 1]), torch.tensor([2.0, 3])])


def test_weights_of_an_rnn_are_one_position() -> None:
    rnn, x, got = nn.RNN(3, 4), leaf(5, 1, 3), Gradients()
    with amanda.apply(got.inputs("rnn_tanh", 0, 2)):
        rnn(x)[0].square().sum().backward()
    close(got[0], grad_of(x))
    close(got[2], [grad_of(p) for p in rnn.parameters()])


def test_what_one_node_cannot_tell_is_an_error_when_asked_after_the_op() -> None:
    x = leaf(5, 1, 3)
    with (
        pytest.raises(UnsupportedError, match="require_outputs=False"),
        amanda.apply(at_inputs("rnn_tanh", lambda g: None, [2], late=True)),
    ):
        nn.RNN(3, 4)(x)


@pytest.mark.parametrize("late", [False])
def test_all_inputs_at_once_with_none_where_there_is_no_gradient(late: bool) -> None:
    layer, calls = nn.Linear(3, 2), list[Any]()
    x = torch.randn(4, 3)
    with amanda.apply(at_inputs("linear", lambda *grads: calls.append(grads), late=late)):
        layer(x).square().sum().backward()
    ((first, weight, bias),) = calls
    assert first is None
    close([weight, bias], expected(lambda w, b: F.linear(x, w, b), layer.weight, layer.bias))


# Without a gradient.


@LATE
def test_input_without_gradient_does_not_call_the_routine(late: bool) -> None:
    x, w, got = torch.randn(3), leaf(3), Gradients()
    with amanda.apply(got.inputs("mul", 0, 1, late=late)):
        (x * w).sum().backward()
    assert list(got) == [1]
    equal(got[1], x)


@LATE
def test_output_that_is_not_used_does_not_call_the_routine(late: bool) -> None:
    x, got = leaf(4), Gradients()
    with amanda.apply(got.outputs("split", 0, 1, late=late)):
        torch.split(x, 2)[1].sum().backward()
    assert list(got) == [1]


def test_all_outputs_at_once() -> None:
    x, calls = leaf(4), list[Any]()
    with amanda.apply(at_outputs("split", lambda *grads: calls.append(grads))):
        a, b = torch.split(x, 2)
        (a + 2 * b).sum().backward()
        torch.split(x, 2)[0].sum().backward()
    one = torch.ones(2)
    equal(calls, [(one, 2 * one), (one, None)])


# Edits.


@LATE
def test_edited_gradients_flow_on(late: bool) -> None:
    x = leaf(3)
    with amanda.apply(
        at_outputs("exp", lambda g: g * 3, late=late), at_inputs("exp", lambda g: g + 1, [0])
    ):
        torch.exp(x).sum().backward()
    equal(grad_of(x), x.detach().exp() * 3 + 1)


def test_edited_contribution_of_one_op_leaves_the_others() -> None:
    x = leaf(3)
    with amanda.apply(at_inputs("exp", torch.zeros_like, [0])):
        (x.exp() + x.sin()).sum().backward()
    equal(grad_of(x), x.detach().cos())


@LATE
def test_edited_contributions_of_the_same_tensor_twice(late: bool) -> None:
    x = leaf(3)
    with amanda.apply(at_inputs("mul", lambda g: g * 10, [1], late=late)):
        (x * x).sum().backward()
    close(grad_of(x), 11 * x.detach())


@LATE
def test_edited_gradients_of_a_list(late: bool) -> None:
    a, b = leaf(2), leaf(2)
    with amanda.apply(at_inputs("cat", lambda g: [g[0] * 2, g[1]], [0], late=late)):
        torch.cat([a, b]).sum().backward()
    equal([grad_of(a), grad_of(b)], [torch.full((2,), 2.0), torch.ones(2)])


@pytest.mark.parametrize("make", [at_outputs, at_inputs])
@pytest.mark.parametrize("bad", [lambda g: g[:1], lambda g: 3.0], ids=["shape", "number"])
def test_gradient_of_a_wrong_kind_is_an_error_of_the_tool(make: Any, bad: Any) -> None:
    with pytest.raises(EditError, match="'exp'"), amanda.apply(make("exp", bad, [0])):
        torch.exp(leaf(3)).sum().backward()


def test_gradient_edits_of_several_tools_fold_in_order() -> None:
    x = leaf(2)
    with amanda.apply(at_outputs("neg", lambda g: g + 1), at_outputs("neg", lambda g: g * 10)):
        torch.neg(x).sum().backward()
    equal(grad_of(x), torch.full((2,), -20.0))


# Ops on shared memory.


WANTED = [None, [0], [1], [0, 1]]


@pytest.mark.parametrize("asked_after", WANTED)
@pytest.mark.parametrize("asked_before", WANTED)
@pytest.mark.parametrize("op_type", ["linear", "mul"])
def test_tools_that_ask_before_and_after_an_op_both_get_its_gradients(
    op_type: str, asked_before: Any, asked_after: Any
) -> None:
    function: Any = getattr(F, op_type, None) or getattr(torch, op_type)
    x, w = leaf(2, 2), leaf(2, 2)
    early, late = list[Any](), list[Any]()
    tools = [
        at_inputs(op_type, lambda *grads: early.append(grads), asked_before),
        at_inputs(op_type, lambda *grads: late.append(grads), asked_after, late=True),
    ]
    with amanda.apply(*tools):
        for run in range(1, 4):
            x.grad = w.grad = None
            function(x, w).square().sum().backward()
            assert (len(early), len(late)) == (run, run)
    for got, positions in ((early, asked_before), (late, asked_after)):
        wanted = [x.grad, w.grad]
        for grads in got:
            equal(
                [g for g in grads if g is not None],
                [wanted[p] for p in (positions or [0, 1])],
            )


def test_edits_of_gradients_asked_before_and_after_an_op_keep_their_order() -> None:
    x, tripled = leaf(3), at_inputs("exp", lambda g: g * 3)
    plus = at_inputs("exp", lambda g: g + 1, late=True)
    with amanda.apply(tripled, plus):
        for _ in range(3):
            x.grad = None
            x.exp().sum().backward()
            equal(grad_of(x), (x.exp() * 3 + 1).detach())


def test_gradients_of_a_view() -> None:
    x, got, seen = leaf(2, 3), Gradients(), Gradients()
    with amanda.apply(got.inputs("transpose", 0), seen.outputs("transpose", 0)):
        (x.transpose(0, 1) * torch.arange(6.0).view(3, 2)).sum().backward()
    equal(seen[0], torch.arange(6.0).view(3, 2))
    equal(got[0], torch.arange(6.0).view(3, 2).t())


def test_gradients_of_an_in_place_op() -> None:
    x, got, seen = leaf(3), Gradients(), Gradients()
    with amanda.apply(got.inputs("mul_", 0), seen.outputs("mul_", 0)):
        y = x * 1
        y.mul_(3)
        y.add_(1)
        y.square().sum().backward()
    out = 2 * y.detach()
    equal([seen[0], got[0]], [out, out * 3])


def test_gradient_stays_with_the_value_that_the_op_made() -> None:
    x, seen = leaf(3), Gradients()
    with amanda.apply(seen.outputs("sin", 0)):
        y = x.sin()
        y.mul_(5)
        y.sum().backward()
    equal(seen[0], torch.full((3,), 5.0))


def test_watching_every_gradient_keeps_sums_bit_for_bit() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(x.exp(), x, x).lerp(x, x).sum() + (x.sin() * x.cos() * x).sum()

    x = leaf(50)
    plain = leaf_copy(x)
    program(plain).backward()

    def together(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(lambda *grads: None)
        context.insert_after_backward_op(lambda *grads: None)

    def one_by_one(context: amanda.OpContext) -> None:
        for position in range(len(context.get_inputs())):
            context.insert_after_backward_op(lambda *grads: None, grad_inputs=[position])

    for analyse in (together, one_by_one):
        x.grad = None
        with amanda.apply(tool(analyse)):
            program(x).backward()
        equal(grad_of(x), grad_of(plain))


@LATE
def test_routine_that_wants_several_gradients_gets_none_for_an_input_without(late: bool) -> None:
    x, w, seen = torch.randn(2, 3), leaf(4, 3), list[Any]()

    def keep(*grads: Any) -> None:
        seen.append([g if g is None else g.clone() for g in grads])

    with amanda.apply(at_inputs("linear", keep, [0, 1], late=late)):
        F.linear(x, w).square().sum().backward()
    ((grad_x, grad_w),) = seen
    assert grad_x is None
    equal(grad_w, grad_of(w))


def test_routine_that_wants_several_outputs_gets_none_for_one_without() -> None:
    x, seen = leaf(5), list[Any]()

    def keep(*grads: Any) -> tuple[Any, ...]:
        seen.append(grads[1])
        return (grads[0] * 2, None)

    with amanda.apply(at_outputs("topk", keep, [0, 1])):
        torch.topk(x, 2).values.sum().backward()
    assert seen == [None]  # Indices have no gradient.
    assert grad_of(x).sum().item() == 4.0


@LATE
@pytest.mark.parametrize("edit", [False, True])
def test_gradients_of_an_op_that_writes_a_view(late: bool, edit: bool) -> None:
    def program(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y[:, 1] += b
        y[:, 1].mul_(3)
        return y.square().sum()

    x, b = leaf(3, 4), leaf(3)
    arriving = 18 * (x[:, 1] + b).detach()  # d(9 (x + b)^2)
    for at, positions in ((at_outputs, [0]), (at_inputs, [0]), (at_inputs, [0, 1])):
        seen = list[Any]()

        def keep(*grads: torch.Tensor, seen: list[Any] = seen) -> Any:
            seen.extend(grad.clone() for grad in grads)
            return [grad * 2 for grad in grads] if edit else None

        x.grad = b.grad = None
        with amanda.apply(at("add_", keep, positions, late=late)):
            program(x, b).backward()
        assert len(seen) == len(positions)
        for grad in seen:
            close(grad, arriving)
        close(grad_of(x)[:, 1], arriving * (2 if edit else 1))
        of_b = edit and (at is at_outputs or 1 in positions)
        close(grad_of(b), arriving * (2 if of_b else 1))
        close(grad_of(x)[:, 0], 2 * x[:, 0].detach())


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.real,
    lambda x: x[1:].imag,
    lambda x: x.conj(),
    lambda x: x.mH[1:],
    lambda x: x.conj().imag,
    lambda x: torch.view_as_real(x)[1:, :, 1],
    lambda x: torch.view_as_real(x.mT),
    lambda x: torch.view_as_complex(torch.view_as_real(x[1:])),
]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("edit", [False, True])
def test_gradients_of_an_op_that_writes_a_view_of_another_kind(
    view: Callable[[torch.Tensor], torch.Tensor], edit: bool
) -> None:
    x = torch.randn(4, 4, dtype=torch.complex128, requires_grad=True)
    seen, arriving = list[torch.Tensor](), list[torch.Tensor]()
    weights = torch.rand_like(view(x))

    def keep(grad: torch.Tensor) -> Any:
        seen.append(grad.clone())
        return grad * 2 if edit else None

    with amanda.apply(at_outputs("mul_", keep, [0])):
        base = x * 1
        written = view(base[:]).mul_(3)
        (written * weights).sum().abs().backward()
    expected_x = leaf_copy(x)
    product = view(expected_x * 1) * 3
    product.register_hook(arriving.append)
    product.register_hook(lambda grad: grad * 2 if edit else None)
    (product * weights).sum().abs().backward()
    close(grad_of(x), grad_of(expected_x))
    close(seen[0], arriving[0])


@pytest.mark.parametrize("ask", ["before", "after", "replace"])
def test_what_was_asked_for_an_execution_holds_for_its_backward(ask: str) -> None:
    kinds = {
        "before": "insert_before_backward_op",
        "after": "insert_after_backward_op",
        "replace": "replace_backward_op",
    }
    doubling = tool(lambda c: getattr(c, kinds[ask])(lambda g: g * 2, [0]), "relu")
    x = torch.ones(4, requires_grad=True)
    with amanda.apply(doubling):
        y = torch.relu(x).sum()
        doubling.invalidate()
        y.backward()
    equal(grad_of(x), torch.full((4,), 2.0))


def test_each_execution_without_cache_meets_its_own_gradient_actions() -> None:
    def analyse(context: amanda.OpContext) -> None:
        scale = context.get_inputs()[0].detach().clone()
        context.insert_after_backward_op(lambda g, by: g * by, [0], by=scale)
        context.insert_before_backward_op(lambda g, by: g * by, [0], by=scale)

    relu, a, b = nn.ReLU(), torch.full((2,), 2.0), torch.full((2,), 3.0)
    a.requires_grad_()
    b.requires_grad_()
    with amanda.apply(tool(analyse, "relu")), amanda.cache_disabled():
        (relu(a).sum() + relu(b).sum()).backward()
    equal(grad_of(a), torch.full((2,), 4.0))
    equal(grad_of(b), torch.full((2,), 9.0))


@LATE
def test_an_op_that_changes_the_shape_of_its_own_input(late: bool) -> None:
    found, x = Gradients(), leaf(2, 1)
    with amanda.apply(found.inputs("squeeze_", 0, late=late)):
        (x.clone().squeeze_(1) * torch.tensor([2.0, 3.0])).sum().backward()
    equal(found[0], torch.tensor([[2.0], [3.0]]))
    equal(x.grad, found[0])


@LATE
@pytest.mark.parametrize("op_type", ["atleast_2d", "atleast_1d", "contiguous", "dropout"])
def test_what_hands_its_input_back_does_so_in_every_execution(op_type: str, late: bool) -> None:
    x = leaf(2, 3)
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "atleast_2d": torch.atleast_2d,
        "atleast_1d": torch.atleast_1d,
        "contiguous": torch.Tensor.contiguous,
        "dropout": lambda value: torch.dropout(value, 0.5, False),
    }
    with amanda.apply(at_inputs(op_type, lambda *grads: None, late=late)):
        assert [functions[op_type](x) is x for _ in range(4)] == [True] * 4


@LATE
def test_several_views_stay_views(late: bool) -> None:
    """This also holds if a routine requests the gradients together: they must not be written."""
    x = leaf(4)
    seen: list[Any] = []
    with amanda.apply(at_outputs("split", lambda *grads: seen.append(grads), late=late)):
        first, second = (x * 1).split(2)
        with pytest.raises(RuntimeError, match="returns multiple views"):
            first.mul_(2)
        (first * 2 + second * 3).sum().backward()
    equal(seen, [(torch.full((2,), 2.0), torch.full((2,), 3.0))])
    equal(x.grad, torch.tensor([2.0, 2.0, 3.0, 3.0]))
    with amanda.apply(at_outputs("unbind", lambda a, b: (a * 2, b), late=late)):
        (found_grad,) = torch.autograd.grad(x.view(2, 2).unbind()[0].sum(), x)
    equal(found_grad, torch.tensor([2.0, 2.0, 0.0, 0.0]))


@LATE
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_compressed_sparse_leaves(late: bool) -> None:
    weight, found = torch.eye(3).to_sparse_csr().requires_grad_(), Gradients()
    x = leaf(3, 2)
    (plain,) = torch.autograd.grad(torch.sparse.mm(weight, x, "sum").sum(), weight)
    with amanda.apply(found.inputs("_sparse_mm", 0, late=late)):
        for _ in range(3):
            found.clear()
            (grad,) = torch.autograd.grad(torch.sparse.mm(weight, x, "sum").sum(), weight)
            equal(grad.values(), plain.values())
            equal(found[0].values(), plain.values())


def test_several_views_by_several_nodes_are_not_cut_off_unnoticed() -> None:
    x = leaf(2, 4)
    with (
        pytest.raises(UnsupportedError, match="go to several backward ops"),
        amanda.apply(at_outputs("hsplit", lambda *grads: None)),
    ):
        torch.hsplit(x * 1, 2)
    with amanda.apply(at_outputs("hsplit", lambda grad: grad * 2, [1])):
        left, right = torch.hsplit(x * 1, 2)
        (left * 3 + right).sum().backward()
    equal(x.grad, torch.tensor([[3.0, 3.0, 2.0, 2.0]]).expand(2, 4))
