"""Operators of compiled graphs under tools that change them, against the same in eager mode."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import amanda

from .interceptors import STAYS_COMPILED

pytestmark = [
    pytest.mark.one_interceptor,
    pytest.mark.usefixtures("fresh_compiler"),
    # A callable that runs eagerly would show nothing.
    pytest.mark.filterwarnings("error::amanda.AmandaWarning"),
    STAYS_COMPILED,
]

X = torch.linspace(-1, 1, 6).reshape(2, 3)
WEIGHT = nn.Parameter(torch.full((3,), 2.0))
LAYER, NORM = nn.Linear(3, 3), nn.BatchNorm1d(3)
MASK = (torch.arange(9).reshape(3, 3) % 2).float()

Log = list[Any]


def noted(log: Log, what: Any, value: Any) -> Any:
    """Note something, and return a value."""
    log.append(what)
    return value


# Programs, and what is done at their operators.


def joined(context: amanda.OpContext, log: Log) -> None:
    if context.op_type == "cat":
        context.insert_before_op(lambda many: [many[0] * 2, many[1]], inputs=[0])
        context.insert_before_backward_op(lambda g: log.append(g.shape), grad_outputs=[0])
        context.insert_after_backward_op(
            lambda many: noted(log, len(many), [g * 2 for g in many]), grad_inputs=[0]
        )


def in_place(context: amanda.OpContext, log: Log) -> None:
    if context.op_type == "relu_":
        context.insert_before_op(lambda v: v - 0.5, inputs=[0])
        context.insert_after_op(lambda v: v * 2, outputs=[0])
        context.insert_before_backward_op(lambda g: noted(log, 1, g * 3), grad_outputs=[0])
        context.insert_after_backward_op(lambda g: noted(log, 2, g * 5), grad_inputs=[0])


def relu_read_twice(x: torch.Tensor) -> Any:
    y = x * 1
    z = y.relu_()
    return y + z.sin()


def view_edited(context: amanda.OpContext, log: Log) -> None:
    if context.op_type == "relu_":
        context.insert_before_op(lambda v: noted(log, 1, v - 0.5), inputs=[0])


def relu_of_view(x: torch.Tensor) -> Any:
    y = x * 1
    y[0].relu_()
    return y.sin()


def item_set(context: amanda.OpContext, log: Log) -> None:
    if context.op_type == "__setitem__":
        context.insert_before_op(lambda v: v * 2, inputs=[2])
        context.insert_after_backward_op(lambda g: noted(log, 1, g * 5), grad_inputs=[2])


def set_item(x: torch.Tensor) -> Any:
    y = torch.zeros(2, 3)
    y[0] = x[0].sin()
    return y * x


def backward_replaced(context: amanda.OpContext, log: Log) -> None:
    if context.op_type == "relu_":
        context.replace_backward_op(lambda g: noted(log, 1, g * 7))


def replaced(context: amanda.OpContext, log: Log) -> None:
    if context.op_type == "sin":
        context.replace_op(lambda v: noted(log, 1, v.cos() * WEIGHT))


def differentiated(context: amanda.OpContext, log: Log) -> None:
    if context.op_type == "sin":
        with amanda.autodiff_enabled():
            context.insert_before_op(lambda v: noted(log, 1, v * v))
            context.insert_after_op(lambda v: noted(log, 2, v.exp()))


def statistics_written(context: amanda.OpContext, log: Log) -> None:
    if context.op_type == "batch_norm":
        context.insert_before_op(lambda v: v * 2, inputs=[0])
        context.insert_after_op(lambda v: v + 1)
        context.insert_after_backward_op(lambda g: noted(log, 1, g * 7), grad_inputs=[0])


def doing_nothing(context: amanda.OpContext, log: Log) -> None:
    context.insert_before_backward_op(lambda *_: log.append(context.op_type), observe=True)


def nothing_done(x: torch.Tensor) -> Any:
    y = torch.dropout((x * 2).contiguous(), 0.0, True)
    return y.to(torch.float32) * F.dropout(x, 0.0)


@amanda.staged
def masked(weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return weight * mask


def pruned(context: amanda.OpContext, log: Log) -> None:
    if context.op_type == "linear":
        context.insert_before_op(masked, inputs=[1], mask=MASK)


def recomputed(x: torch.Tensor) -> Any:
    return checkpoint(lambda v: LAYER(v).sin().cos(), x, use_reentrant=False)


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[..., None]]] = {
    "a list of tensors": (lambda x: torch.cat([x.sin(), x.cos()]) * 3, joined),
    "in place": (relu_read_twice, in_place),
    "in place by a function": (lambda x: F.relu(x * 1, inplace=True).sin(), in_place),
    "in place in a view": (relu_of_view, view_edited),
    "an item is set": (set_item, item_set),
    "in place, another backward": (relu_read_twice, backward_replaced),
    "a replacement on the host": (lambda x: x.sin().exp(), replaced),
    "a differentiated routine on the host": (lambda x: x.sin().exp(), differentiated),
    "running statistics": (lambda x: NORM(x).sin(), statistics_written),
    "operators that return their input": (nothing_done, doing_nothing),
    "a mask inside of checkpointing": (recomputed, pruned),
}


def trained(call: Callable[..., Any], analyse: Callable[..., None]) -> tuple[Log, Sequence[Any]]:
    """Return what is noted in two steps of training, and the results."""
    parameters = [WEIGHT, *LAYER.parameters(), *NORM.parameters()]
    for parameter in parameters:
        parameter.grad = None
    NORM.reset_running_stats()
    log: Log = []
    tool, found, x = amanda.Tool(), [], X.clone().requires_grad_()
    tool.add_inst_for_op(lambda context: analyse(context, log))
    with amanda.apply(tool):
        for _ in range(2):
            output = call(x)
            output.sum().backward()
            found.append(output.detach())
    given = [t.grad for t in (x, *parameters) if t.grad is not None]
    return log, [*found, *given, *NORM.buffers()]


@pytest.mark.parametrize(
    "name",
    [
        name if name == "in place" else pytest.param(name, marks=pytest.mark.slow)
        for name in PROGRAMS
    ],
)
def test_as_in_eager_mode(name: str) -> None:
    program, analyse = PROGRAMS[name]
    expected = trained(program, analyse)
    found = trained(torch.compile(program, backend="aot_eager", fullgraph=True), analyse)
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1])
    assert expected[0] or analyse is pruned


#: Routine -> how it is inserted at `linear`, as one that is differentiated.
PLACES: dict[str, Callable[[amanda.OpContext, Any], None]] = {
    "before": lambda context, routine: context.insert_before_op(routine, inputs=[0]),
    "after": lambda context, routine: context.insert_after_op(routine),
    "weight": lambda context, routine: context.insert_before_op(routine, inputs=[1]),
    "instead": lambda context, routine: context.replace_op(routine, inputs=[0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_routine_that_learns(place: str, staged: bool, frozen: bool) -> None:
    """A parameter of its own gets its gradient, also if no value of the program requires one."""
    layer, gradients = nn.Linear(3, 3).requires_grad_(not frozen), []
    for compile_it in (False, True):
        scale = torch.tensor(0.5, requires_grad=True)

        def learn(value: torch.Tensor, scale: torch.Tensor = scale) -> torch.Tensor:
            return value * scale

        routine = amanda.staged(learn) if staged else learn

        def analyse(context: amanda.OpContext, routine: Any = routine) -> None:
            if context.op_type == "linear":
                with amanda.autodiff_enabled():
                    PLACES[place](context, routine)

        tool = amanda.Tool()
        tool.add_inst_for_op(analyse)
        call = torch.compile(layer, backend="aot_eager") if compile_it else layer
        with warnings.catch_warnings(), amanda.apply(tool):
            # Without a value that requires a gradient, the callable runs eagerly.
            warnings.simplefilter("ignore", amanda.AmandaWarning)
            for _ in range(2):
                call(X + 2).sum().backward()
        gradients.append(scale.grad)
    eager, compiled = gradients
    torch.testing.assert_close(compiled, eager)
    assert eager is not None
    assert eager.abs() > 0
