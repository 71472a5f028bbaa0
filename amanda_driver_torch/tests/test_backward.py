"""Backward ops: which nodes are whose, the raw view, and gradients of gradients."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import amanda
from amanda_core.errors import EditError
from amanda_core.testing.kit.tools import at_outputs, before, tool, watching_backward

from .tensors import close, equal, grad_of, leaf, leaf_copy


def raw(op_type: str, action: Any) -> amanda.Tool:
    return tool(action, op_type, backward=True)


# One forward op, several backward ops.


def owned(seen: list[tuple[str, str | None]], forward: str) -> list[str]:
    return [name for name, owner in seen if owner == forward]


def test_linear_on_three_dimensions_has_four_backward_ops() -> None:
    seen, watch = watching_backward()
    with amanda.apply(watch):
        nn.Linear(3, 2)(leaf(4, 5, 3)).sum().backward()
    nodes = ["AddmmBackward0", "TBackward0", "ViewBackward0", "ViewBackward0"]
    # From torch 2.14 on one of the views is made by `_unsafe_view`.
    assert sorted(name.replace("Unsafe", "") for name in owned(seen, "linear")) == nodes
    assert owned(seen, "sum") == ["SumBackward0"]


def test_backward_ops_of_one_op_share_its_id_and_have_ids_of_their_own() -> None:
    ids: list[tuple[int, int | None]] = []
    watch = tool(
        lambda c: (
            ids.append((c.get_op_id(), c.get_backward_op_id()))
            if c.forward is not None and c.forward.op_type == "linear"
            else None
        ),
        backward=True,
    )
    layer = nn.Linear(3, 2)
    with amanda.apply(watch), amanda.cache_disabled():
        for _ in range(2):
            layer(leaf(4, 5, 3)).sum().backward()
    assert len({forward for forward, _ in ids}) == 1
    assert len({backward for _, backward in ids}) == 4
    assert ids[:4] == ids[4:]


def test_attention_spelled_out_belongs_to_one_op() -> None:
    seen, watch = watching_backward()
    q = leaf(1, 2, 4, 8)
    with amanda.apply(watch), sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    nodes = owned(seen, "scaled_dot_product_attention")
    assert nodes.count("BmmBackward0") == 2
    assert len(nodes) > 10
    assert {owner for _, owner in seen} == {"scaled_dot_product_attention", "sum", None}


def test_steps_of_an_rnn_belong_to_one_op() -> None:
    seen, watch = watching_backward()
    with amanda.apply(watch):
        nn.RNN(3, 4)(leaf(5, 1, 3))[0].sum().backward()
    assert owned(seen, "rnn_tanh").count("TanhBackward0") == 5
    assert {owner for _, owner in seen} == {"rnn_tanh", "sum", None}


def test_assignment_to_an_index_has_backward_ops() -> None:
    seen, watch = watching_backward()
    x, v = leaf(4), leaf(2)
    with amanda.apply(watch):
        y = x * 1
        y[1:3] = v
        y.sum().backward()
    assert any("CopySlices" in name for name in owned(seen, "__setitem__"))


def test_raw_operator_has_the_name_of_its_node() -> None:
    names: list[str] = []
    conv = nn.Conv2d(1, 1, 3)
    watch = tool(lambda c: names.append(c.get_backward_op().__name__), backward=True)
    with amanda.apply(watch):
        conv(torch.randn(1, 1, 4, 4)).sum().backward()
    assert names[:2] == ["SumBackward0", "ConvolutionBackward0"]


# AccumulateGrad.


def test_accumulation_is_an_op_of_its_own() -> None:
    facts: list[Any] = []

    def analyse(context: amanda.OpContext) -> None:
        op = context.get_op()
        facts.append((op.__name__, op is context.get_backward_op(), context.get_inputs()))
        facts.append(context.get_op_id() == context.get_backward_op_id())

    with amanda.apply(raw("AccumulateGrad", analyse)):
        nn.Linear(2, 1, bias=False)(torch.ones(1, 2)).sum().backward()
    assert facts == [("AccumulateGrad", True, None), True]


def test_shared_parameter_is_accumulated_once_with_the_whole_gradient() -> None:
    w, got = nn.Parameter(torch.randn(3)), list[torch.Tensor]()
    watch = raw(
        "AccumulateGrad", lambda c: c.insert_before_backward_op(lambda g: got.append(g.clone()))
    )
    with amanda.apply(watch):
        (w.exp() + w.sin()).sum().backward()
    assert len(got) == 1
    close(got[0], (w.exp() + w.cos()).detach())


def test_each_parameter_is_accumulated_under_its_own_name_in_every_iteration() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    names: list[str] = []
    watch = raw(
        "AccumulateGrad",
        lambda c: c.insert_before_backward_op(lambda g, name=c.name: names.append(name)),
    )
    with amanda.apply(watch):
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
    wanted = {f"{name}:AccumulateGrad": 2 for name, _ in model.named_parameters()}
    assert Counter(names) == wanted


# Raw gradients.


def test_raw_gradients_are_those_of_the_node() -> None:
    layer, x = nn.Linear(3, 2), leaf(4, 3)
    got: dict[str, Any] = {}

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(lambda *grads: got.update(out=grads))
        context.insert_after_backward_op(lambda *grads: got.update(inputs=grads))

    with amanda.apply(raw("AddmmBackward0", analyse)):
        layer(x).square().sum().backward()
    ((grad_out,), (bias, mat1, mat2)) = got["out"], got["inputs"]
    close(grad_out, 2 * layer(x).detach())
    close([bias, mat1, mat2.t()], [grad_of(layer.bias), grad_of(x), grad_of(layer.weight)])


def test_raw_gradients_are_edited_before_and_after_the_node() -> None:
    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_backward_op(lambda g: g * 3)
        context.insert_after_backward_op(lambda g: g + 1)

    x = leaf(3)
    with amanda.apply(raw("ExpBackward0", analyse)):
        x.exp().sum().backward()
    equal(grad_of(x), x.detach().exp() * 3 + 1)


def test_edit_at_accumulation_changes_what_is_stored() -> None:
    w = nn.Parameter(torch.ones(2))
    edit = raw("AccumulateGrad", lambda c: c.insert_before_backward_op(lambda g: g * 4))
    with amanda.apply(edit):
        (w * 2).sum().backward()
        (w * 2).sum().backward()
    equal(grad_of(w), torch.full((2,), 16.0))


def test_raw_gradient_of_a_wrong_shape_is_an_error_of_the_tool() -> None:
    edit = raw("ExpBackward0", lambda c: c.insert_before_backward_op(lambda g: g[:1]))
    with pytest.raises(EditError, match="ExpBackward0"), amanda.apply(edit):
        leaf(3).exp().sum().backward()


# Double backward.


def test_edits_hold_in_gradients_of_gradients() -> None:
    x = leaf(3)
    y = leaf_copy(x * 2)
    with amanda.apply(before("exp", lambda v: v * 2)):
        (first,) = torch.autograd.grad((x.exp() * 3).sum(), x, create_graph=True)
        first.square().sum().backward()
    (plain,) = torch.autograd.grad((y.exp() * 3).sum(), y, create_graph=True)
    plain.square().sum().backward()
    equal(first, plain)
    equal(grad_of(x), grad_of(y))


def test_edited_gradients_are_differentiated_as_they_flow() -> None:
    x = leaf(3)
    with amanda.apply(at_outputs("exp", lambda g: g * 2)):
        (first,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
    equal(first.detach(), 2 * x.detach().exp())


def test_second_order_nodes_are_counted_as_backward_ops_of_the_same_op() -> None:
    seen, watch = watching_backward()
    x = leaf(3)
    counts = []
    with amanda.apply(watch):
        for _ in range(3):
            seen.clear()
            (first,) = torch.autograd.grad((x.exp() * x).sum(), x, create_graph=True)
            once = len(seen)
            first.sum().backward()
            counts.append((Counter(seen[:once]), Counter(seen[once:])))
    first_order, second_order = counts[-1]
    assert counts[-2] == counts[-1]
    assert first_order[("MulBackward0", "mul")] == 1
    assert first_order[("ExpBackward0", "exp")] == 1
    # exp * x: d/dx of (g * x) and (g * exp), and of (g * exp) in ExpBackward.
    assert second_order[("MulBackward0", "mul")] == 2
    assert second_order[("MulBackward0", "exp")] == 1
    assert second_order[("ExpBackward0", "exp")] == 1
