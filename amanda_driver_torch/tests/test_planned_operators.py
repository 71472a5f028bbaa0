"""Operators of every kind with an empty routine, in executions in which plans run in cached form.

The oracle of what routines see is the first execution, which Python handles.
"""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amanda
from amanda_driver_torch import interceptor
from amanda_driver_torch.torch_internals.extension import native

from .repeated_executions import TIMES
from .tensors import equal, grad_of, leaf

X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)


NUMBERS = torch.ones(2, 3, 4)


def written(x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    x[0] = 2.0
    return x.add_(1).relu_()


def in_view(x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    x[1, :2] += 1
    return x


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda x: x.view(6, 4).reshape(2, -1),
    "views by list": lambda x: x.view([6, 4]).reshape((2, -1)),
    "expand": lambda x: x.unsqueeze(0).expand(5, -1, -1, -1).permute(3, 2, 1, 0),
    "index": lambda x: x[0, 1:][None, ..., ::2] + x[:, torch.tensor([0, 2])].sum(),
    "attribute": lambda x: x[0].T.mT,
    "keywords": lambda x: torch.softmax(input=x, dim=-1).sum(dim=(0, 1), keepdim=True),
    "dtype": lambda x: x.sum(dtype=torch.float64).to(torch.float32),
    "factory": lambda x: x + torch.zeros(2, 3, 4, dtype=torch.float32, device="cpu"),
    "list": lambda x: torch.cat([x, torch.stack([x[0], x[1]])], dim=1),
    "several outputs": lambda x: torch.mul(*x.split(2, dim=2)),
    "einsum": lambda x: torch.einsum("bij,kj->bik", x, x[0]),
    "structure": lambda x: x.topk(2, dim=2).values,
    "defaults": lambda x: F.avg_pool2d(x[None], 2),
    # Of three tensors: where one is given three times, the order of the sum may change.
    "attention": lambda x: F.scaled_dot_product_attention(
        x, x.cos(), x.sin(), attn_mask=torch.zeros(3, 3)
    ),
    "several outputs, several used": lambda x: torch.mul(*x.unbind(0)) + x.max(dim=0).values,
    "properties": lambda x: x.mT.mT.float() + x.float(),
    "the same tensor": lambda x: F.dropout(x.contiguous().to(torch.float32), 0.5, False) * 2,
    "destination": lambda x: x + torch.add(NUMBERS, 1, out=NUMBERS.clone()),
    "normalization": lambda x: F.batch_norm(x, torch.ones(3), torch.ones(3), training=True),
    "in place, differentiable": lambda x: (x * 1).add_(x).mul_(2),
    "in place": written,
    "in place in a view": in_view,
}
#: Of these, others are fast samples.
SIMILAR = {
    "views by list",
    "expand",
    "dtype",
    "factory",
    "structure",
    "defaults",
    "in place in a view",
}
programs = pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=[pytest.mark.slow] * (n in SIMILAR)) for n, p in PROGRAMS.items()],
    ids=PROGRAMS,
)
WAYS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients": nullcontext,
    "no gradients": torch.no_grad,
}


class Seen(amanda.Tool):
    """Notes what each execution's empty routines are given."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.note, name=context.name, context=context)
        context.insert_after_op(self.note, observe=True, name=context.name, context=context)

    def analyse_backward(self, context: amanda.OpContext) -> None:
        name = str(context.get_backward_op())
        context.insert_before_backward_op(self.note, name=name, context=context)
        context.insert_after_backward_op(self.note, name=name, context=context)

    def note(self, *values: Any, name: str, context: amanda.OpContext) -> None:
        inputs = context.get_inputs() if context.is_forward() else None
        self.log.append((name, dict(context.attrs), text(values), text(inputs)))


def text(values: Any) -> str:
    return str(torch.utils._pytree.tree_map_only(torch.Tensor, numbers, values))


def numbers(value: torch.Tensor) -> Any:
    with amanda.disabled():
        return value.tolist()


def run(program: Callable[[torch.Tensor], Any], leaf_: torch.Tensor) -> None:
    result = program(leaf_)
    if torch.is_grad_enabled():
        result.sum().backward()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@programs
def test_each_execution_shows_what_the_first_one_shows(
    program: Callable[[torch.Tensor], Any], way: Callable[[], AbstractContextManager[Any]]
) -> None:
    seen, logs, x = Seen(), [], X.clone().requires_grad_()
    with amanda.apply(seen), way():
        for _ in range(TIMES):
            run(program, x)
            logs.append(list(seen.log))
            seen.log.clear()
    # In the first pass the results of a node are seen by routines that its own analysis added.
    assert all(log == logs[0] for log in logs[1:])
    assert len(logs[0]) >= 2


#: Where a tool may insert a routine -> the method of the context, and whether it is that of a
#: backward operator.
PLACES: dict[str, tuple[str, bool]] = {
    "before": ("insert_before_op", False),
    "after": ("insert_after_op", False),
    "gradients of outputs": ("insert_before_backward_op", False),
    "gradients of inputs": ("insert_after_backward_op", False),
    "before a backward operator": ("insert_before_backward_op", True),
    "after a backward operator": ("insert_after_backward_op", True),
}
#: Programs that Python runs at a place while gradients are recorded -> why.
IN_PYTHON: dict[tuple[str, str], str] = {
    ("attention", "gradients of inputs"): "several backward operators compute them together",
    **dict.fromkeys(
        [("in place in a view", place) for place in PLACES],
        "the node of a view that was written is made when it is read, by Python",
    ),
    **dict.fromkeys(
        [("in place", place) for place in PLACES if place.startswith("gradients")],
        "the view that an assignment made is written",
    ),
}


class Every(amanda.Tool):
    """Calls an empty routine at one place of every operator."""

    def __init__(self, place: str) -> None:
        super().__init__()
        insert, backward = PLACES[place]
        self.add_inst_for_op(lambda context: getattr(context, insert)(empty), backward=backward)


def empty(*values: Any) -> None:
    pass


@pytest.mark.one_interceptor
@pytest.mark.skipif(native is None, reason="the native interceptor is not available")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_planned_op_runs_no_python_but_its_routine(
    name: str, way: Callable[[], AbstractContextManager[Any]], place: str
) -> None:
    why = IN_PYTHON.get((name, place)) if way is nullcontext else None
    if why is not None:
        pytest.skip(why)
    program = PROGRAMS[name]
    assert interceptor().name == "native"
    calls: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and "/src/amanda" in frame.f_code.co_filename:
            calls.append(f"{frame.f_globals['__name__']}.{frame.f_code.co_name}")

    x = X.clone().requires_grad_()
    with amanda.apply(Every(place)), way():
        for _ in range(TIMES):
            run(program, x)
        sys.setprofile(profile)
        try:
            run(program, x)
        finally:
            sys.setprofile(None)
    # Contexts, signatures and lists are not made again.
    slow = ("._execution.", "._operators.", ".context", ".session.Session.open", ".records")
    assert [call for call in calls if any(part in call for part in slow)] == []


@pytest.mark.one_interceptor
@pytest.mark.skipif(native is None, reason="the native interceptor is not available")
@pytest.mark.parametrize("place", PLACES)
def test_left_out_steps_run_no_python(place: str) -> None:
    model, x, calls = nn.Linear(4, 4), X.clone().requires_grad_(), list[str]()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and "._autograd." in frame.f_globals.get("__name__", ""):
            calls.append(frame.f_code.co_qualname)

    def counted() -> list[str]:
        calls.clear()
        sys.setprofile(profile)
        try:
            run(model, x)
        finally:
            sys.setprofile(None)
        return list(calls)

    # What runs from the third of these steps on is what would run from then on.
    left_out = amanda.select(steps=[*range(2, 6), *range(8, 12)])
    with amanda.apply(Every(place).where(~left_out)):
        for step in range(12):
            found = counted()
            amanda.step()
            if step in (4, 5, 10, 11):
                assert found == []


def scaled(gradient: Any, factor: float) -> Any:
    if isinstance(gradient, (list, tuple)):
        return [scaled(one, factor) for one in gradient]
    return None if gradient is None else gradient * factor


class Scaling(amanda.Tool):
    """Scales the gradients of every operator at one place."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        getattr(context, PLACES[self.place][0])(self.scale)

    def scale(self, *gradients: Any) -> Any:
        return [scaled(gradient, 1.5) for gradient in gradients]


@pytest.mark.parametrize("place", [place for place in PLACES if place.startswith("gradients")])
@programs
def test_each_execution_edits_gradients_as_the_first_one_does(
    program: Callable[[torch.Tensor], Any], place: str
) -> None:
    found = []
    with amanda.apply(Scaling(place)):
        for _ in range(TIMES):
            x = X.clone().requires_grad_()
            run(program, x * 1)
            found.append(grad_of(x))
    for gradient in found[1:]:
        equal(gradient, found[0])
    x = X.clone().requires_grad_()
    run(program, x * 1)
    plain = grad_of(x)
    assert not plain.any() or not torch.equal(plain, found[0])


def test_attributes_are_those_of_the_execution() -> None:
    found: list[Any] = []

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "sum":
            context.insert_before_op(lambda *_: found.append(context.attrs["dtype"]))

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    dtypes = [torch.float64, torch.float64, torch.float64, torch.float32, torch.float64] * 2
    with amanda.apply(tool), torch.no_grad():
        for dtype in dtypes:
            assert X.sum(dtype=dtype).dtype is dtype
    assert found == dtypes


def test_an_assignment_runs_once_and_may_be_edited() -> None:
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "__setitem__":
            context.insert_after_op(lambda value: value * 3)

    tool.add_inst_for_op(analyse)
    for way in WAYS.values():
        with amanda.apply(tool), way():
            for number in range(TIMES):
                x = torch.ones(2)
                x[0] = float(number)
                with amanda.disabled():
                    equal(x, torch.tensor([3.0 * number, 3.0]))


def test_weights_that_an_op_writes_are_known_in_each_execution() -> None:
    found: list[Any] = []
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "add_":
            context.insert_before_op(lambda *_: found.append(context.weights.written))

    tool.add_inst_for_op(analyse)
    layer = nn.Linear(2, 2)
    with amanda.apply(tool), torch.no_grad():
        for _ in range(TIMES):
            layer(torch.ones(2))
            layer.weight.add_(1)
    assert found == [{0}] * TIMES


def test_backward_routines_find_inputs_that_were_edited() -> None:
    found: list[Any] = []
    tool = amanda.Tool()

    def raw(context: amanda.OpContext) -> None:
        if context.op_type == "AddmmBackward0":
            context.insert_before_backward_op(
                lambda *_: found.append(context.get_inputs()[1] is w), grad_outputs=[0]
            )

    tool.add_inst_for_op(raw, backward=True)
    tool.add_inst_for_op(
        lambda c: c.insert_before_op(lambda x: x * 2, inputs=[0]) if c.op_type == "linear" else None
    )
    x, w, b = leaf(2, 3), leaf(4, 3), leaf(4)
    with amanda.apply(tool):
        for _ in range(TIMES):
            F.linear(x, w, b).sum().backward()
    assert found == [True] * TIMES


class Leaves(amanda.Tool):
    """Scales the gradients that leaves accumulate."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.calls = factor, 0
        self.add_inst_for_op(lambda context: None)
        self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        if str(context.get_op()) == "<AccumulateGrad>" or context.op_type == "AccumulateGrad":
            context.insert_before_backward_op(self.scale)

    def scale(self, grad: torch.Tensor) -> torch.Tensor | None:
        self.calls += 1
        return None if self.factor == 1 else grad * self.factor


def test_each_leaf_at_one_place_is_hooked() -> None:
    leaves = [leaf(3) for _ in range(3)]
    with amanda.apply(tool := Leaves(2.0)):
        for _ in range(TIMES):
            for one in leaves:
                one.grad = None
                (one * 3).sum().backward()
                equal(one.grad, torch.full((3,), 6.0))
    assert tool.calls == TIMES * len(leaves)


def test_a_leaf_used_several_times_is_hooked_once() -> None:
    layer = nn.Linear(2, 2)
    with amanda.apply(tool := Leaves(1.0)):
        for _ in range(TIMES):
            (layer(layer(torch.ones(2))) + layer.bias).sum().backward()
    assert tool.calls == 2 * TIMES


def test_a_parameter_set_anew_is_hooked() -> None:
    layer = nn.Linear(2, 2)
    with amanda.apply(tool := Leaves(2.0)):
        for _ in range(2 * TIMES):
            layer.weight = nn.Parameter(torch.ones(2, 2))
            layer(torch.ones(2)).sum().backward()
            equal(layer.weight.grad, torch.full((2, 2), 2.0))
    assert tool.calls == 4 * TIMES


def test_a_leaf_s_node_that_stays_follows_the_tools() -> None:
    w = leaf(3)
    node: Any = torch.autograd.graph.get_gradient_edge(w).node
    first, second, none = Leaves(2.0), Leaves(5.0), amanda.Tool()
    none.add_inst_for_op(lambda context: None, backward=True)

    def factor() -> float:
        w.grad = None
        (w * 1).sum().backward()
        return float(grad_of(w)[0])

    for _ in range(2):
        with amanda.apply(none):
            for _ in range(TIMES):
                with amanda.apply(amanda.Tool()):
                    assert factor() == 1.0
            with amanda.apply(first):
                assert [factor() for _ in range(TIMES)] == [2.0] * TIMES
        with amanda.apply(first):
            assert [factor() for _ in range(TIMES)] == [2.0] * TIMES
            with amanda.apply(second):
                assert [factor() for _ in range(TIMES)] == [10.0] * TIMES
            assert [factor() for _ in range(TIMES)] == [2.0] * TIMES
        assert [factor() for _ in range(TIMES)] == [1.0] * TIMES
    assert "amanda" not in node.metadata
