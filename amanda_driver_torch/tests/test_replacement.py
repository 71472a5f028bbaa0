"""Replacing an op, its whole backward (aligned) or one of its backward ops (raw)."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amanda
from amanda_core.errors import EditError, ReplacementConflictError, RoutineResultError
from amanda_core.runtime.threads import original
from amanda_core.testing.kit.tools import (
    after,
    at_inputs,
    at_outputs,
    before,
    replacing,
    replacing_backward,
    tool,
    watching_backward,
)

from .tensors import equal, grad_of, leaf

# replace_op.


def test_identity_removes_an_op() -> None:
    x = leaf(3)
    with amanda.apply(replacing("relu", lambda v: v, [0])):
        out = torch.relu(x)
        out.sum().backward()
    equal(out, x)
    equal(grad_of(x), torch.ones(3))


def test_identity_removes_an_in_place_op_of_a_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    x = torch.randn(2, 3)
    with amanda.apply(replacing("relu_", lambda v: v, [0])):
        out = model(x)
    equal(out, model[2](model[0](x)))


def itself(*values: Any) -> Any:
    run = original()
    assert run is not None
    return run(values)


@pytest.fixture
def into_its_argument() -> Iterator[Any]:
    """Define operators that return nothing: one writes an argument, the other `out=`."""

    def doubled(x: torch.Tensor, y: torch.Tensor) -> None:
        y.copy_(x * 2)

    def copied(x: torch.Tensor, out: list[torch.Tensor]) -> None:
        for one in out:
            one.copy_(x)

    with torch.library._scoped_library("amanda_tests_of_nothing", "DEF") as library:
        library.define("doubled(Tensor x, Tensor(a!) y) -> ()")
        library.define("copied(Tensor x, *, Tensor(a!)[] out) -> ()")
        library.impl("doubled", doubled, "CPU")
        library.impl("copied", copied, "CPU")
        yield torch.ops.amanda_tests_of_nothing


@pytest.mark.parametrize("run", [itself, lambda *values: None], ids=["itself", "nothing"])
def test_an_op_that_returns_nothing(into_its_argument: Any, run: Any) -> None:
    written = [torch.zeros(3), torch.zeros(3), torch.zeros(3)]
    with amanda.apply(
        replacing("amanda_tests_of_nothing::doubled", run),
        replacing("amanda_tests_of_nothing::copied", run),
    ):
        for _ in range(2):
            assert into_its_argument.doubled(torch.ones(3), written[0]) is None
            assert into_its_argument.copied(torch.ones(3), out=written[1:]) is None
    one, two = (1, 2) if run is itself else (0, 0)
    equal(written, [torch.full((3,), float(value)) for value in (two, one, one)])


@pytest.mark.parametrize(
    "run", [itself, lambda x, sizes, dim: x.split(sizes, dim)], ids=["itself", "other"]
)
def test_an_op_that_returns_nothing_only_with_out(run: Any) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    written = [torch.zeros(2, 1), torch.zeros(2, 2)]
    copies: Any = torch.split_with_sizes_copy  # Declared to return nothing.
    with amanda.apply(replacing("split_with_sizes_copy", run)):
        for _ in range(2):
            given = copies(x, [1, 2], 1)
            into = copies(x, [1, 2], 1, out=written)
    assert into is None
    for found in (given, written):
        equal(list(found), list(x.split([1, 2], 1)))


@pytest.mark.parametrize(
    "op", ["conv2d", "batch_norm", "relu_", "add", "cat", "add_", "__getitem__", "softmax"]
)
def test_a_replacement_may_run_the_op_itself(op: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
    x = leaf(2, 2, 5, 5)

    def program() -> tuple[torch.Tensor, torch.Tensor]:
        y = F.softmax(model(x).flatten(1), -1)
        y = torch.cat([y + y, y], dim=1)[:, 1:].clone()
        y.add_(1)
        return y, torch.autograd.grad((y**2).sum(), x)[0]

    expected = program()
    with amanda.apply(replacing(op, itself)):
        for _ in range(2):
            for found, value in zip(program(), expected, strict=True):
                equal(found, value)
    assert original() is None


def test_replacement_differentiates_as_written() -> None:
    x = leaf(3)
    with amanda.apply(replacing("relu", lambda v: v.exp() * 2)):
        out = torch.relu(x)
        out.sum().backward()
    equal(out, x.exp() * 2)
    equal(grad_of(x), x.detach().exp() * 2)


def test_original_of_a_replaced_op_does_not_run() -> None:
    runs: list[int] = []

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    with amanda.apply(replacing("Counting", lambda v: v * 2)):
        out = Counting.apply(torch.ones(2))
    assert runs == []
    equal(out, torch.full((2,), 2.0))


def test_insertions_see_a_replacement_as_the_op() -> None:
    x = leaf(3)
    tools = (
        before("relu", lambda v: v + 1),
        replacing("relu", lambda v: v * 2),
        after("relu", lambda v: v * 10),
    )
    with amanda.apply(*tools):
        out = torch.relu(x)
        out.sum().backward()
    equal(out, (x + 1) * 20)
    equal(grad_of(x), torch.full((3,), 2.0))


def test_aligned_gradients_of_a_replacement() -> None:
    x, got = leaf(3), dict[str, torch.Tensor]()
    with amanda.apply(
        replacing("relu", lambda v: v * v),
        at_outputs("relu", lambda g: got.update(out=g.clone())),
        at_inputs("relu", lambda g: got.update(input=g.clone()), [0]),
    ):
        (torch.relu(x) * 3).sum().backward()
    equal(got, {"out": torch.full((3,), 3.0), "input": 6 * x.detach()})


def test_several_outputs_come_out_in_the_ops_own_type() -> None:
    x = torch.randn(4)
    index = torch.tensor([0])
    with amanda.apply(
        replacing("split", lambda v: (v[:1], v[1:]), [0]),
        replacing("topk", lambda v: (v[:1], index), [0]),
    ):
        parts = torch.split(x, 2)
        top = torch.topk(x, 1)
    assert type(parts) is tuple
    equal(list(parts), [x[:1], x[1:]])
    assert type(top) is torch.return_types.topk
    equal([top.values, top.indices], [x[:1], index])


def test_an_output_that_the_op_does_not_give_may_be_missing() -> None:
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 3, 8)
    op = "_native_multi_head_attention"
    with torch.no_grad():
        expected, _ = attention(x, x, x, need_weights=False)
        with amanda.apply(replacing(op, itself)):
            found, weights = attention(x, x, x, need_weights=False)
        with (
            pytest.raises(EditError, match="'b' cannot replace the result"),
            amanda.apply(replacing(op, lambda *values: (expected, "b"))),
        ):
            attention(x, x, x, need_weights=False)
    assert weights is None
    equal(found, expected)


def test_replacement_of_an_in_place_op_is_written_to_its_storage() -> None:
    x = leaf(2)
    with amanda.apply(replacing("relu_", lambda v: v * 3)):
        y = x * 1
        view = y[:1]
        assert y.relu_() is y
        y.sum().backward()
    equal(y, x * 3)
    equal(view, x[:1] * 3)
    equal(grad_of(x), torch.full((2,), 3.0))


def test_replacement_of_an_assignment_and_of_a_call_with_a_destination() -> None:
    x, destination = torch.zeros(3), torch.zeros(2)
    with amanda.apply(
        replacing("__setitem__", lambda values, index, value: values + 1),
        replacing("add", lambda *values: values[0] * 3),
    ):
        x[1] = 5
        assert torch.add(torch.ones(2), 1, out=destination) is destination
    equal(x, torch.ones(3))
    equal(destination, torch.full((2,), 3.0))


def test_replacement_that_returns_nothing_is_an_error() -> None:
    with (
        pytest.raises(RoutineResultError, match="returned None"),
        amanda.apply(replacing("mul", lambda *values: None)),
    ):
        torch.ones(2) * 2


@pytest.mark.parametrize("replace", ["replace_op", "replace_backward_op"])
def test_two_replacements_of_one_op_are_an_error_naming_both_tools(replace: str) -> None:
    class First(amanda.Tool):
        pass

    class Second(amanda.Tool):
        pass

    tools = First(), Second()
    for each in tools:
        each.add_inst_for_op(lambda context: getattr(context, replace)(lambda v: v))
    x = leaf(2)
    with (
        pytest.raises(ReplacementConflictError, match=r"First and .*Second request"),
        amanda.apply(*tools),
    ):
        torch.relu(x)
    equal(torch.relu(x), x.clamp_min(0))


# replace_backward_op on a forward context: instead of the whole backward.


@pytest.mark.parametrize("form", [lambda g: g * 7, lambda g: (g * 7,), lambda g: [g * 7]])
def test_backward_with_one_input_is_replaced(form: Callable[[Any], Any]) -> None:
    x = leaf(3)
    with amanda.apply(replacing_backward("exp", form)):
        out = torch.exp(x)
        (out * 2).sum().backward()
    equal(out.detach(), x.detach().exp())
    equal(grad_of(x), torch.full((3,), 14.0))


@pytest.mark.parametrize("form", [lambda g: g, lambda g: (g,), lambda g: [None, g]])
def test_the_one_input_with_a_gradient_may_stand_behind_others(form: Any) -> None:
    layer = nn.Linear(3, 2, bias=False)
    kernel = torch.full((2, 3), 2.0)
    with amanda.apply(replacing_backward("linear", lambda _: form(kernel))):
        layer(torch.randn(4, 3)).sum().backward()
    equal(grad_of(layer.weight), kernel)


def test_original_of_a_replaced_backward_does_not_run() -> None:
    runs: list[int] = []

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return grad

    x = leaf(3)
    seen, watch = watching_backward()
    with amanda.apply(replacing_backward("Counting", lambda g: g * 7), watch):
        Counting.apply(x).sum().backward()
    assert runs == []
    assert ("CountingBackward", "Counting") not in seen
    equal(grad_of(x), torch.full((3,), 7.0))


def test_backward_of_linear_is_replaced_for_each_input() -> None:
    layer, x = nn.Linear(3, 2), leaf(4, 5, 3)

    def routine(grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert grad.shape == (4, 5, 2)
        return torch.ones(4, 5, 3), torch.full((2, 3), 2.0), torch.full((2,), 3.0)

    with amanda.apply(replacing_backward("linear", routine)):
        layer(x).sum().backward()
    equal(grad_of(x), torch.ones(4, 5, 3))
    equal(grad_of(layer.weight), torch.full((2, 3), 2.0))
    equal(grad_of(layer.bias), torch.full((2,), 3.0))


def test_input_without_gradient_gets_none_from_a_replacement() -> None:
    conv = nn.Conv2d(1, 1, 3)
    kernel = torch.full((1, 1, 3, 3), 2.0)
    with amanda.apply(replacing_backward("conv2d", lambda g: (None, kernel, g.sum((0, 2, 3))))):
        conv(torch.randn(1, 1, 5, 5)).sum().backward()
    equal(grad_of(conv.weight), kernel)
    equal(grad_of(conv.bias) if conv.bias is not None else None, torch.tensor([9.0]))


def test_backward_of_an_in_place_op_is_replaced() -> None:
    x = leaf(3)
    with amanda.apply(replacing_backward("relu_", lambda g: g * 5)):
        y = x * 1
        assert F.relu_(y) is y
        y.sum().backward()
    equal(y.detach(), x.detach().clamp_min(0))
    equal(grad_of(x), torch.full((3,), 5.0))


def test_backward_of_an_in_place_op_on_a_view_is_replaced() -> None:
    x = leaf(3)
    with amanda.apply(replacing_backward("mul_", lambda g: g * 5)):
        y = x * 1
        y[1:].mul_(2)
        y.sum().backward()
    equal(y.detach(), x.detach() * torch.tensor([1.0, 2, 2]))
    equal(grad_of(x), torch.tensor([1.0, 5, 5]))


def test_backward_with_a_list_of_inputs_is_replaced() -> None:
    a, b = leaf(2), leaf(2)
    with amanda.apply(replacing_backward("cat", lambda g: ([g[:2] * 2, g[2:] * 3],))):
        torch.cat([a, b]).sum().backward()
    equal([grad_of(a), grad_of(b)], [torch.full((2,), 2.0), torch.full((2,), 3.0)])


def test_replaced_backward_acts_from_the_first_run_with_gradients_on() -> None:
    x = leaf(3)
    with amanda.apply(replacing_backward("exp", lambda g: g * 7)):
        for grad in (False, False, True):
            with torch.set_grad_enabled(grad):
                out = torch.exp(x)
        out.sum().backward()
    equal(grad_of(x), torch.full((3,), 7.0))


BAD: list[tuple[Callable[[Any], Any], type[Exception]]] = [
    (lambda g: None, RoutineResultError),
    (lambda g: g, RoutineResultError),
    (lambda g: (g,), RoutineResultError),
    (lambda g: (), RoutineResultError),
    (lambda g: (g, g[:1]), EditError),
    (lambda g: (g, 3.0), EditError),
]


@pytest.mark.parametrize(("routine", "kind"), BAD)
def test_replaced_backward_with_a_wrong_result_is_an_error(
    routine: Callable[[Any], Any], kind: type[Exception]
) -> None:
    x, w = leaf(3), leaf(3)
    with (
        pytest.raises(kind, match=r"replace_backward_op .*'mul'"),
        amanda.apply(replacing_backward("mul", routine)),
    ):
        (x * w).sum().backward()
    assert x.grad is None
    assert w.grad is None


# replace_backward_op on a backward context: instead of that one backward op.


def replacing_raw(op_type: str, routine: Callable[..., Any]) -> amanda.Tool:
    return tool(lambda c: c.replace_backward_op(routine), op_type, backward=True)


def test_one_backward_op_is_replaced() -> None:
    x = leaf(3)
    with amanda.apply(replacing_raw("ReluBackward0", lambda g: g * 9)):
        torch.relu(x).sum().backward()
    equal(grad_of(x), torch.full((3,), 9.0))


def test_backward_op_with_several_results_is_replaced_in_its_own_order() -> None:
    layer, x = nn.Linear(3, 2), leaf(4, 3)
    results = torch.full((2,), 5.0), torch.ones(4, 3), torch.full((3, 2), 2.0)
    with amanda.apply(replacing_raw("AddmmBackward0", lambda g: results)):
        layer(x).sum().backward()
    equal(grad_of(layer.bias), results[0])
    equal(grad_of(x), results[1])
    equal(grad_of(layer.weight), results[2].t())


@pytest.mark.parametrize(
    "routine", [lambda g: None, lambda g: (g,), lambda g: (g, g, g, g)], ids=["none", "1", "4"]
)
def test_replaced_backward_op_with_a_wrong_count_is_an_error(routine: Any) -> None:
    layer = nn.Linear(3, 2)
    with (
        pytest.raises(RoutineResultError, match="AddmmBackward0"),
        amanda.apply(replacing_raw("AddmmBackward0", routine)),
    ):
        layer(leaf(4, 3)).sum().backward()


@pytest.mark.parametrize(
    ("op_type", "result"), [("relu", "text"), ("relu", []), ("relu", (1, 2)), ("topk", leaf(1))]
)
def test_replacement_must_return_what_the_op_would(op_type: str, result: Any) -> None:
    x = torch.randn(4)
    calls: dict[str, Callable[[], Any]] = {
        "relu": lambda: torch.relu(x),
        "topk": lambda: torch.topk(x, 2),
    }
    with (
        amanda.apply(tool(lambda c: c.replace_op(lambda *v: result), op_type)),
        pytest.raises((EditError, RoutineResultError), match=op_type),
    ):
        calls[op_type]()
