"""Edits pass straight through: values change, the graph does not. The oracle is edited by hand."""

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
from amanda_core.errors import EditError, RoutineResultError
from amanda_core.testing.kit.tools import after, before, tool

from .tensors import close, equal, grad_of, leaf, leaf_copy

X = torch.ones(2)


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


# Ordinary ops.


def test_edited_weight_acts_like_a_twin_with_that_weight() -> None:
    layer, x = nn.Linear(3, 2), leaf(4, 3)
    with amanda.apply(before("linear", double, [1])):
        out = layer(x)
        out.square().sum().backward()
    w, b, x2 = leaf_copy(layer.weight * 2), leaf_copy(layer.bias), leaf_copy(x)
    expected = F.linear(x2, w, b)
    expected.square().sum().backward()
    equal(out, expected)
    equal(grad_of(x), grad_of(x2))
    equal(grad_of(layer.weight), grad_of(w))
    equal(grad_of(layer.bias), grad_of(b))


def test_edited_weight_stays_what_it_was() -> None:
    layer = nn.Linear(3, 2)
    kept = layer.weight.detach().clone()
    with amanda.apply(before("linear", double, [1])):
        layer(torch.ones(1, 3))
    equal(layer.weight.detach(), kept)


def test_edited_activation_gets_the_gradient_of_the_value_it_stands_for() -> None:
    x = leaf(3)
    with amanda.apply(before("exp", double)):
        torch.exp(x.sin()).sum().backward()
    equal(grad_of(x), (torch.exp(x.sin() * 2) * x.cos()).detach())


def test_edited_view_whose_base_was_written_has_its_place_after_the_write() -> None:
    written = leaf(3)
    base = torch.zeros(3)
    view = base.view(3)  # which has no place in a graph yet
    base.copy_(written)
    with amanda.apply(before("mul", double, [0])):
        product = torch.mul(view, 5)
    product.sum().backward()
    equal(product, view * 2 * 5)
    equal(grad_of(written), torch.full((3,), 5.0))


def test_edited_output_passes_the_gradient_to_the_op() -> None:
    x = leaf(3)
    with amanda.apply(after("exp", lambda out: out * 2 + 1)):
        out = torch.exp(x)
        out.square().sum().backward()
    edited = x.detach().exp() * 2 + 1
    equal(out.detach(), edited)
    equal(grad_of(x), 2 * edited * x.detach().exp())


def test_keyword_arguments_have_the_positions_of_the_signature() -> None:
    x, w = torch.randn(4, 3), torch.randn(2, 3)
    with amanda.apply(before("linear", torch.zeros_like, [1])):
        zeros = F.linear(x, weight=w), F.linear(weight=w, input=x), F.linear(x, w, bias=None)
    for out in zeros:
        equal(out, torch.zeros(4, 2))


def test_argument_left_out_is_none_and_can_be_supplied() -> None:
    x, w = torch.randn(4, 3), torch.randn(2, 3)
    given: list[Any] = []

    def supply(bias: Any) -> torch.Tensor:
        given.append(bias)
        return torch.ones(2)

    with amanda.apply(before("linear", supply, [2])):
        out = F.linear(x, weight=w)
    assert given == [None]
    equal(out, F.linear(x, w, torch.ones(2)))


def test_list_of_tensors_is_one_position() -> None:
    a, b = leaf(2), leaf(2)

    def second(tensors: Any) -> list[torch.Tensor]:
        return [tensors[0], tensors[1] * 3]

    with amanda.apply(before("cat", second, [0])):
        out = torch.cat([a, b])
        (out * torch.arange(4.0)).sum().backward()
    equal(out, torch.cat([a, b * 3]))
    equal(grad_of(a), torch.tensor([0.0, 1]))
    equal(grad_of(b), torch.tensor([2.0, 3]))


def test_list_of_another_length_is_an_error() -> None:
    with (
        pytest.raises(EditError, match="list of 1 values"),
        amanda.apply(before("cat", lambda tensors: [[tensors[0]]], [0])),
    ):
        torch.cat([torch.ones(1), torch.ones(1)])


@pytest.mark.parametrize(
    ("op_type", "call"),
    [("split", lambda x: x.split(2)), ("unbind", torch.unbind), ("topk", lambda x: x.topk(2))],
)
def test_one_of_several_outputs_is_edited(op_type: str, call: Callable[[Any], Any]) -> None:
    x = leaf(4)
    x2 = leaf_copy(x)
    with amanda.apply(after(op_type, lambda out: -out, [0])):
        got = call(x)
        (got[0].sum() + 3 * got[1].sum()).backward()
    plain = call(x2)
    (plain[0].sum() + 3 * plain[1].sum()).backward()
    assert type(got) is type(plain)
    assert len(got) == len(plain)
    equal(got[0], -plain[0])
    equal(list(got[1:]), list(plain[1:]))
    equal(grad_of(x), grad_of(x2))


def test_one_output_of_lstm_is_edited() -> None:
    lstm, x = nn.LSTM(2, 3), leaf(5, 1, 2)
    plain, (h, c) = lstm(x)
    (wanted,) = torch.autograd.grad(plain.sum() + h.sum(), x)
    with amanda.apply(after("lstm", double, [0])):
        got, (h2, c2) = lstm(x)
    equal([got, h2, c2], [plain * 2, h, c])
    (straight,) = torch.autograd.grad(got.sum() + h2.sum(), x)
    close(straight, wanted)


def test_autodiff_enabled_differentiates_the_routine() -> None:
    def analyse(context: amanda.OpContext) -> None:
        with amanda.autodiff_enabled():
            context.insert_before_op(double, inputs=[0])
            context.insert_after_op(lambda out: out * 5)

    x = leaf(3)
    with amanda.apply(tool(analyse, "exp")):
        torch.exp(x).sum().backward()
    equal(grad_of(x), (torch.exp(x * 2) * 5 * 2).detach())


def test_tools_fold_in_the_order_of_application() -> None:
    add, scale = before("relu", lambda v: v + 1), before("relu", lambda v: v * 10)
    x = torch.tensor([1.0, 2.0])
    with amanda.apply(add, scale):
        first = torch.relu(x)
    with amanda.apply(scale), amanda.apply(add):
        second = torch.relu(x)
    equal([first, second], [torch.tensor([20.0, 30]), torch.tensor([11.0, 21])])


def test_edit_to_an_equal_value_keeps_sums_of_gradients_bit_for_bit() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(x.exp(), x, x).lerp(x, x).sum() + (x.sin() * x.cos() * x).sum()

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_op(
            lambda *values: [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
        )

    x = leaf(50)
    plain = leaf_copy(x)
    program(plain).backward()
    with amanda.apply(tool(analyse)):
        program(x).backward()
    equal(grad_of(x), grad_of(plain))


def test_routine_that_returns_nothing_changes_nothing_and_adds_no_node() -> None:
    x = leaf(3)
    with amanda.apply(before("exp", lambda v: None), after("exp", lambda v: v)):
        out = torch.exp(x)
    assert out.grad_fn is not None
    assert out.grad_fn.name() == "ExpBackward0"
    (edge,) = out.grad_fn.next_functions
    assert getattr(edge[0], "variable", None) is x


@pytest.mark.parametrize("make", [torch.ones, lambda *a, **k: torch.ones_like(X, **k)])
def test_edited_leaf_stays_the_leaf_that_gets_the_gradient(make: Any) -> None:
    op_type = "ones" if make is torch.ones else "ones_like"
    with amanda.apply(after(op_type, double)):
        for _ in range(3):
            x = make(2, requires_grad=True)
            assert x.is_leaf
            x.square().sum().backward()
            equal(x.detach(), torch.full((2,), 2.0))
            equal(grad_of(x), torch.full((2,), 4.0))


@pytest.mark.parametrize("point", [before, after])
def test_full_backward_hooks_of_modules_beside_edits(point: Any) -> None:
    """Torch finds the place of such hooks by the node of its identity's output."""
    layer, heard = nn.Linear(2, 2), list[Any]()
    layer.register_full_backward_hook(lambda module, given, got: heard.append((given, got)))

    def doubled(module: Any, got: Any) -> Any:
        return (got[0] * 2,)

    layer.register_full_backward_pre_hook(doubled)

    def run() -> Any:
        heard.clear()
        layer.zero_grad()
        x = torch.ones(1, 2, requires_grad=True)
        layer(x).sum().backward()
        return [*heard, x.grad, layer.weight.grad]

    expected = run()
    everything = tool(
        lambda c: (c.insert_before_op if point is before else c.insert_after_op)(
            lambda *values: [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
        )
    )
    with amanda.apply(everything):
        for _ in range(3):
            equal(run(), expected)


# Values of other kinds.


def test_without_grad_mode_nothing_requires_grad() -> None:
    x = leaf(3)
    with amanda.apply(before("exp", double), after("exp", double)):
        with torch.no_grad():
            quiet = torch.exp(x)
        with torch.inference_mode():
            inference = torch.exp(x)
        plain = torch.exp(x.detach())
    assert not any(out.requires_grad for out in (quiet, inference, plain))
    assert inference.is_inference()
    expected = (x * 2).exp().detach() * 2
    equal([quiet, inference.clone(), plain], [expected] * 3)


@pytest.mark.parametrize("insert", [before, after])
def test_value_made_in_inference_mode_keeps_the_gradient(insert: Any) -> None:
    def routine(value: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return value * 2

    x = leaf(3)
    x2 = leaf_copy(x)
    for each, edit in ((x, routine), (x2, double)):
        with amanda.apply(insert("exp", edit)):
            torch.exp(each).square().sum().backward()
    equal(grad_of(x), grad_of(x2))


@pytest.mark.parametrize("insert", [before, after])
def test_edit_of_another_shape_is_a_clear_error_where_a_gradient_flows(insert: Any) -> None:
    with (
        pytest.raises(EditError, match=r"shape \(1,\) .*\(3,\).*'relu'"),
        amanda.apply(insert("relu", lambda v: v[:1])),
    ):
        torch.relu(leaf(3))
    with amanda.apply(insert("relu", lambda v: v[:1])):
        assert torch.relu(torch.ones(3)).shape == (1,)


@pytest.mark.parametrize("bad", [3, "text", [1, 2]])
def test_edit_that_is_no_tensor_is_an_error(bad: Any) -> None:
    with (
        pytest.raises((EditError, RoutineResultError), match="relu"),
        amanda.apply(before("relu", lambda v: bad)),
    ):
        torch.relu(leaf(3))


def test_edit_of_another_dtype_gets_its_gradient_cast_back() -> None:
    x = leaf(3)
    with amanda.apply(after("exp", torch.Tensor.double)):
        out = torch.exp(x)
        out.sum().backward()
    assert out.dtype is torch.float64
    equal(grad_of(x), x.detach().exp())


def test_complex_values() -> None:
    x = torch.randn(3, dtype=torch.cfloat).requires_grad_()
    with amanda.apply(before("mul", lambda v: v * 1j, [0])):
        (x * 2).abs().square().sum().backward()
    y = leaf_copy(x * 1j)
    (y * 2).abs().square().sum().backward()
    close(grad_of(x), grad_of(y))


def test_sparse_values_and_gradients() -> None:
    sparse, dense = torch.eye(3).to_sparse(), torch.randn(3, 3)
    with amanda.apply(before("mm", double, [0])):
        product = torch.mm(sparse, dense)
    equal(product, dense * 2)
    table = nn.Embedding(5, 2, sparse=True)
    with amanda.apply(before("embedding", double, [0])):
        table(torch.tensor([1, 1])).sum().backward()
    assert grad_of(table.weight).is_sparse
    equal(grad_of(table.weight).to_dense()[1], torch.full((2,), 2.0))


class Plain(torch.Tensor):
    pass


class Overriding(torch.Tensor):
    calls: list[str] = []  # noqa: RUF012  Each test clears it.

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("kind", [Plain, Overriding])
def test_tensor_subclass_stays_what_it_is(kind: type[torch.Tensor]) -> None:
    base = torch.randn(3)
    with amanda.apply(before("exp", double), after("exp", double)):
        out = torch.exp(base.as_subclass(kind))
    assert type(out) is kind
    equal(out.as_subclass(torch.Tensor), torch.exp(base * 2) * 2)


def test_override_of_a_subclass_is_asked_as_often_as_without_tools() -> None:
    x = torch.randn(3).as_subclass(Overriding)
    Overriding.calls.clear()
    F.relu(x)
    plain = list(Overriding.calls)
    Overriding.calls.clear()
    with amanda.apply(before("relu", lambda *values: None)):
        F.relu(x)
    assert plain == Overriding.calls


def test_parameter_as_input() -> None:
    p = nn.Parameter(torch.randn(3))
    with amanda.apply(before("exp", double)):
        out = torch.exp(p)
        out.sum().backward()
    assert type(out) is torch.Tensor
    equal(grad_of(p), (p * 2).exp().detach())


def test_what_analysis_makes_in_inference_mode_serves_in_training() -> None:
    def analyse(context: amanda.OpContext) -> None:
        mask = (context.get_inputs()[1] > 0).float()
        context.replace_op(lambda x, w, b: F.linear(x, w * mask, b), [0, 1, 2])

    layer, x = nn.Linear(4, 2), torch.randn(3, 4)
    with amanda.apply(tool(analyse, "linear")):
        with torch.inference_mode():
            layer(x)
        layer(x).sum().backward()
    equal(grad_of(layer.weight), (layer.weight > 0) * x.sum(0))


@pytest.mark.parametrize("observe", [True, False])
def test_analysis_runs_again_for_another_overload(observe: bool) -> None:
    """The overload of `max` without an axis has one position, the one with an axis has three."""
    tool, seen = amanda.Tool(), []

    def analyse(context: amanda.OpContext) -> None:
        positions = list(range(len(context.get_inputs() or ())))
        context.insert_before_op(
            lambda *values: seen.append(len(values)), inputs=positions, observe=observe
        )

    tool.add_inst_for_op(analyse)
    x = torch.arange(6.0).reshape(2, 3)
    with amanda.apply(tool):
        found: list[Any] = [torch.max(x, *axis) for axis in ((0,), (), (1,), ())]
    assert seen == [3, 1, 3, 1]
    assert found[1] == found[3] == 5.0
    assert found[0].values.tolist() == [3.0, 4.0, 5.0]
    assert found[2].values.tolist() == [2.0, 5.0]
