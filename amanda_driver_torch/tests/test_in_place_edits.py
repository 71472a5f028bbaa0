"""Edits of ops that write (in-place, views, `out=`, statistics) or return their own input."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amanda
from amanda_core.errors import EditError, UnsupportedError
from amanda_core.testing.kit.tools import Everywhere, after, at_inputs, at_outputs, before, tool

from .repeated_executions import TIMES
from .tensors import equal, grad_of, leaf


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


# In-place ops.


def test_edit_before_an_in_place_op_is_written_to_its_storage() -> None:
    x = leaf(3)
    with amanda.apply(before("add_", double, [0])):
        y = x * 1
        alias = y.view(3)
        assert y.add_(1.0) is y
        y.sum().backward()
    equal([y, alias], [x * 2 + 1] * 2)
    equal(grad_of(x), torch.ones(3))


@pytest.mark.parametrize(
    "edit",
    [
        before("zero_", double, [0]),
        after("zero_", double),
        tool(lambda context: context.replace_op(double)),
    ],
    ids=["before", "after", "replaced"],
)
def test_an_edit_of_an_expanded_tensor_that_an_op_writes_is_refused(edit: amanda.Tool) -> None:
    x = torch.ones(1, 4)
    expanded = x.expand(2, 4)
    with amanda.apply(edit), pytest.raises(EditError, match="share memory"):
        expanded.zero_()


def test_an_op_may_write_an_expanded_tensor_under_routines_that_return_none() -> None:
    x = torch.ones(1, 4)
    expanded = x.expand(2, 4)
    with amanda.apply(Everywhere(lambda *values: None)):
        assert expanded.zero_() is expanded
    equal(x, torch.zeros(1, 4))


def test_what_has_no_elements_shares_none() -> None:
    empty = torch.empty_strided((3, 0), (0, 1))
    with amanda.apply(before("zero_", double, [0])):
        assert empty.zero_() is empty


@pytest.mark.parametrize(
    ("op_type", "call", "slope"),
    [
        ("sigmoid_", torch.sigmoid_, lambda v: torch.sigmoid(v) * (1 - torch.sigmoid(v))),
        ("relu_", F.relu_, lambda v: (v > 0).float()),
        ("exp_", torch.exp_, torch.exp),
        ("tanh_", torch.tanh_, lambda v: 1 - torch.tanh(v) ** 2),
    ],
)
def test_edit_after_an_in_place_op_leaves_what_the_op_saved(
    op_type: str, call: Callable[[Any], Any], slope: Callable[[Any], Any]
) -> None:
    x, seen = leaf(5), []
    arounds: list[AbstractContextManager[object]] = [nullcontext() for _ in range(TIMES)]
    arounds += [torch.autograd.graph.save_on_cpu(), nullcontext()]
    with amanda.apply(after(op_type, lambda v: v * 5 + 3)):
        for around in arounds:
            x.grad = None
            with around:
                y = x * 1
                assert call(y) is y
            y.sum().backward()
            seen.append((y.detach(), grad_of(x)))
    for result, grad in seen:
        equal(result, call(x.detach().clone()) * 5 + 3)
        torch.testing.assert_close(grad, slope(x.detach()))


@pytest.mark.parametrize("position", [0, 1])
def test_a_differentiated_edit_may_save_what_the_op_writes(position: int) -> None:
    x, other, gate = leaf(3), leaf(3), leaf(3)
    twin = [value.detach().clone().requires_grad_() for value in (x, other, gate)]
    with amanda.apply(tool(lambda context: gated(context, position, gate))):
        y = x * 1
        y += other * 1
        torch.relu_(y).square().sum().backward()
    operands = [twin[0] * 1, twin[1] * 1]
    operands[position] = operands[position] * twin[2]
    torch.relu(operands[0] + operands[1]).square().sum().backward()
    for value, expected in zip((x, other, gate), twin, strict=True):
        equal(grad_of(value), grad_of(expected))


def gated(context: amanda.OpContext, position: int, gate: torch.Tensor) -> None:
    if context["type"] == "add":
        with amanda.autodiff_enabled():
            context.insert_before_op(lambda value: value * gate, inputs=[position])


def test_edit_before_an_in_place_op_is_what_its_formula_sees() -> None:
    x = leaf(3)
    with amanda.apply(before("sigmoid_", double)):
        (x * 1).sigmoid_().sum().backward()
    s = torch.sigmoid(x.detach() * 2)
    torch.testing.assert_close(grad_of(x), s * (1 - s))


@pytest.mark.parametrize("insert", [before, after])
def test_edit_of_an_in_place_op_on_a_view_reaches_the_base(insert: Any) -> None:
    x = leaf(6)
    with amanda.apply(insert("mul_", lambda v: v + 1, [0])):
        y = x * 1
        y[2:4].mul_(3)
        y.sum().backward()
    expected = x.detach().clone()
    middle = expected[2:4]
    expected[2:4] = (middle + 1) * 3 if insert is before else middle * 3 + 1
    equal(y.detach(), expected)
    equal(grad_of(x), torch.tensor([1.0, 1, 3, 3, 1, 1]))


def test_edit_of_the_value_assigned_to_an_index() -> None:
    x, v = leaf(5), leaf(2)
    with amanda.apply(before("__setitem__", double, [2])):
        y = x * 1
        y[1:3] = v
        y.sum().backward()
    equal(y.detach(), torch.cat([x[:1], v * 2, x[3:]]).detach())
    equal(grad_of(x), torch.tensor([1.0, 0, 0, 1, 1]))
    equal(grad_of(v), torch.ones(2))


def test_edit_after_an_assignment_changes_the_whole_tensor() -> None:
    x, v = leaf(5), leaf(2)
    with amanda.apply(after("__setitem__", double)):
        y = x * 1
        y[1:3] = v
        y.sum().backward()
    equal(y.detach(), torch.cat([x[:1], v, x[3:]]).detach() * 2)
    equal(grad_of(x), torch.tensor([1.0, 0, 0, 1, 1]))
    equal(grad_of(v), torch.ones(2))


@pytest.mark.parametrize("insert", [before, after])
@pytest.mark.parametrize("bad", [lambda v: v.double(), lambda v: v[:1]])
def test_written_argument_keeps_its_shape_and_dtype(insert: Any, bad: Any) -> None:
    with (
        pytest.raises(EditError, match="add_"),
        amanda.apply(insert("add_", bad, [0])),
    ):
        torch.ones(3).add_(1)


METADATA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "squeeze_": lambda t: t.squeeze_(),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "t_": lambda t: t.t_(),
    "transpose_": lambda t: t.transpose_(0, 1),
    "swapaxes_": lambda t: t.swapaxes_(0, 1),
    "as_strided_": lambda t: t.as_strided_((2,), (1,)),
}


@pytest.mark.parametrize("op_type", METADATA)
def test_edit_after_an_in_place_op_on_metadata_is_refused(op_type: str) -> None:
    call = METADATA[op_type]
    with pytest.raises(UnsupportedError, match=op_type), amanda.apply(after(op_type, double)):
        call(torch.randn(2, 1))


@pytest.mark.parametrize("op_type", METADATA)
def test_edit_before_an_in_place_op_on_metadata(op_type: str) -> None:
    call, x = METADATA[op_type], torch.randn(2, 1)
    expected = call(x * 2)
    with amanda.apply(before(op_type, double, [0])):
        assert call(x) is x
    equal(x, expected)


# Values that a routine changes in place.


def test_routine_may_change_its_value_in_place() -> None:
    x = leaf(3)
    start = x.detach().clone()
    with amanda.apply(before("exp", lambda v: v.mul_(2)), after("neg", lambda v: v.mul_(3))):
        outputs = [torch.exp(x), torch.neg(x)]
    equal(outputs, [torch.exp(start * 2), start * -6])
    equal(x.detach(), start * 2)


def test_what_an_op_saved_cannot_be_changed_in_place_unnoticed() -> None:
    x = leaf(3)
    with amanda.apply(after("exp", lambda v: v.mul_(2))):
        out = torch.exp(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# Arguments that an op updates, and destinations.


def test_batch_norm_on_an_edited_input_updates_its_own_statistics() -> None:
    edited, plain, x = nn.BatchNorm1d(3), nn.BatchNorm1d(3), torch.randn(8, 3)
    with amanda.apply(before("batch_norm", double, [0])):
        out = edited(x)
    equal(out, plain(x * 2))
    equal(edited.running_mean, plain.running_mean)
    equal(edited.running_var, plain.running_var)


def test_edited_running_statistics_are_written_to_the_buffer() -> None:
    edited, plain, x = nn.BatchNorm1d(3), nn.BatchNorm1d(3), torch.randn(8, 3)
    held = edited.running_mean
    assert plain.running_mean is not None

    def analyse(context: amanda.OpContext) -> None:
        position = context.input_names.index("running_mean")
        context.insert_before_op(lambda mean: mean + 1, inputs=[position])

    with amanda.apply(tool(analyse, "batch_norm")):
        edited(x)
    plain.running_mean += 1
    plain(x)
    assert edited.running_mean is held
    equal(edited.running_mean, plain.running_mean)


def test_destination_holds_the_edited_result() -> None:
    x, destination = torch.randn(3), torch.empty(3)
    with amanda.apply(before("add", lambda v: v * 3, [0]), after("add", double)):
        assert torch.add(x, 1, out=destination) is destination
    equal(destination, (x * 3 + 1) * 2)


def test_destination_of_several_outputs() -> None:
    values, indices = torch.empty(2), torch.empty(2, dtype=torch.long)
    x = torch.tensor([3.0, 1.0, 2.0])
    with amanda.apply(after("topk", lambda v: v * 10, [0])):
        torch.topk(x, 2, out=(values, indices))
    equal(values, torch.tensor([30.0, 20.0]))
    equal(indices, torch.tensor([0, 2]))


# Ops that return their own input.

SAME: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.Tensor.contiguous,
    lambda t: t.to(torch.float32),
    lambda t: F.dropout(t, training=False),
    torch.conj_physical,  # Its schema does not say that a real tensor comes back as it is.
]


@pytest.mark.parametrize("call", SAME)
def test_op_that_returns_its_input_still_does_under_every_kind_of_watching(call: Any) -> None:
    x = leaf(3)
    with amanda.apply(Everywhere(lambda *values: None)):
        assert call(x) is x


@pytest.mark.parametrize("insert", [before, after])
def test_op_that_returns_its_input_can_be_edited(insert: Any) -> None:
    x = leaf(3)
    with amanda.apply(insert("contiguous", double)):
        out = x.contiguous()
    equal(out, x * 2)
    out.sum().backward()
    equal(grad_of(x), torch.ones(3))


def test_op_that_returns_its_input_has_no_gradient_of_its_own() -> None:
    x, calls = leaf(3), list[Any]()
    with amanda.apply(
        at_outputs("contiguous", calls.append), at_inputs("contiguous", calls.append, [0])
    ):
        x.contiguous().sum().backward()
    assert calls == []
    equal(grad_of(x), torch.ones(3))


def test_a_list_that_the_op_writes_is_edited_where_it_lies() -> None:
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    with amanda.apply(before("_foreach_add_", lambda xs: [xs[0] * 10, xs[1]], [0])):
        torch._foreach_add_([first, second], 1.0)
    equal(first, torch.tensor([11.0, 21.0]))
    equal(second, torch.tensor([4.0]))
