"""Training under torch.compile while tools are applied: steps of optimizers, inputs, and states."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amanda

from .interceptors import STAYS_COMPILED
from .tensors import equal, grad_of
from .test_compiled_graphs import graphs

pytestmark = [
    pytest.mark.one_interceptor,
    pytest.mark.usefixtures("fresh_compiler"),
    STAYS_COMPILED,
]

X = torch.linspace(-1, 1, 40).reshape(5, 8)


class Counting(amanda.Tool):
    """Counts the calls of routines that look at all values and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        def count(*_: Any) -> None:
            self.calls[context.op_type] += 1

        context.insert_before_op(count, observe=True)
        context.insert_after_op(count, observe=True)
        context.insert_before_backward_op(count, observe=True)
        context.insert_after_backward_op(count, observe=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.1, foreach=True)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_steps_of_optimizers_stay_compiled(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Their operators have no gradients, so that requests for these change nothing."""

    def trained(*tools: amanda.Tool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = make(model.parameters())
        step = torch.compile(optimizer.step, backend="aot_eager")
        found = []
        for _ in range(4):
            with amanda.apply(*tools):
                optimizer.zero_grad()
                model(X).square().mean().backward()
                step()
            found += [parameter.detach().clone() for parameter in model.parameters()]
        return found

    expected, tool = trained(), Counting()
    equal(trained(tool), expected)
    assert any(name.startswith("_foreach_") for name in tool.calls)


def test_inputs_that_require_gradients_are_no_weights() -> None:
    """A program may make a new one in each step: the code is not bound to it for long."""
    model = nn.Linear(8, 8)

    def called(x: torch.Tensor) -> Any:
        return model(x.exp()) + x

    compiled, tool = torch.compile(called, backend="aot_eager"), Counting()

    def gradients(called: Any) -> list[torch.Tensor]:
        found = []
        for scale in range(8):
            x = (X * scale).requires_grad_()
            called(x).square().sum().backward()
            found.append(grad_of(x))
        return found

    expected = gradients(called)
    with amanda.apply(tool) as handle:
        found = gradients(compiled)
        before, calls = graphs(), dict(tool.calls)
        found += gradients(compiled)
        assert graphs() == before
        assert "made in each step" in str(handle.coverage())
    equal(found, expected * 2)
    assert tool.calls == {name: 2 * count for name, count in calls.items()}
    assert calls["linear"] == 8 * 4


def test_leaves_that_stay_are_weights() -> None:
    def called(x: torch.Tensor, many: list[torch.Tensor]) -> torch.Tensor:
        for weight in many:
            x = F.linear(x, weight)
        return x

    many = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
    absolute = [weight.abs() for weight in many]
    compiled, tool = torch.compile(called, backend="aot_eager"), amanda.Tool()
    tool.add_inst_for_op(
        lambda context: context.insert_before_op(
            amanda.staged(lambda value, sign: value * sign),
            inputs=[1],
            sign=context.value(1).detach().sign(),
        )
    )
    for _ in range(2):
        with amanda.apply(tool):
            found = compiled(X, many), compiled(X, many[::-1])
        equal(found, (called(X, absolute), called(X, absolute[::-1])))


STATES: dict[str, Callable[[], Any]] = {
    "record": lambda: torch.profiler.record_function("part"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no-grad": torch.no_grad,
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("none"),
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("state", STATES)
def test_states_that_a_program_enters(state: str, backend: str) -> None:
    """Operators in them are seen, and nothing remains entered."""

    def called(x: torch.Tensor) -> Any:
        with STATES[state]():
            x = F.linear(x, weight)
        return x.float() * 2

    weight, tool, eager = torch.randn(8, 8, requires_grad=True), Counting(), Counting()
    expected = called(X)
    with amanda.apply(eager):
        called(X)
    compiled = torch.compile(called, backend=backend)
    refused = pytest.warns(amanda.AmandaWarning, match="it enters the inference mode")
    with refused if state == "inference" else contextlib.nullcontext(), amanda.apply(tool):
        found = compiled(X)
    equal(found, expected)
    assert tool.calls == eager.calls != Counter()
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", ["real", "mT", "H"])
def test_what_dynamo_runs_while_it_traces_is_not_seen(name: str) -> None:
    weight, tool = nn.Parameter(torch.randn(8, 8)), amanda.Tool()
    seen: list[str] = []
    tool.add_inst_for_op(
        lambda context: context.insert_after_op(
            lambda value: seen.append(context.op_type), observe=True
        )
    )
    compiled = torch.compile(lambda x: x @ getattr(weight, name).float(), backend="eager")
    with amanda.apply(tool):
        for _ in range(2):
            compiled(X)
    assert len(seen) == 6
    assert seen[:3] == seen[3:]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_routines_on_constants_run_with_the_program_only(backend: str) -> None:
    """A compiler computes with the values of constants while it traces."""
    seen: list[float] = []

    def edit(value: torch.Tensor) -> torch.Tensor:
        seen.append(value.item())
        return value + len(seen)

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "tensor":
            context.insert_after_op(edit)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    called = torch.compile(lambda x: x * torch.tensor(3.0), backend=backend)
    with amanda.apply(tool):
        found = [called(X) for _ in range(3)]
    equal(found, [X * (3.0 + count) for count in (1, 2, 3)])
    assert seen == [3.0] * 3


def test_tools_change_nothing_that_code_without_them_is_bound_to() -> None:
    """`pad` is traced by Dynamo, and run by the driver for the operators inside it."""

    def called(x: torch.Tensor) -> Any:
        return F.pad(x, (0, 1)).sum() * F.softmax(x, -1)

    compiled, tool = torch.compile(called, backend="aot_eager"), Counting()
    equal(compiled(X), called(X))
    for _ in range(2):
        with amanda.apply(tool):
            compiled(X)
            before = graphs()
            with amanda.disabled():
                equal(compiled(X), called(X))
        equal(compiled(X), called(X))
        assert graphs() == before


@pytest.mark.slow
def test_inductor_keeps_the_order_of_routines() -> None:
    """Also where it computes in another order to save memory; here in the reverse."""
    runs: list[list[str]] = []

    def analyse(context: amanda.OpContext) -> None:
        context.insert_after_op(lambda *_: runs[-1].append(context.op_type), observe=True)

    def called(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (x.sin() @ weight).sum() + y.cos().view(-1).tanh().sum()

    def reverse(nodes: list[Any], *_: Any) -> list[Any]:
        found: list[Any] = nodes[0].scheduler.topological_sort_schedule(nodes[::-1])
        return found

    tool, weight = amanda.Tool(), torch.randn(8, 8)
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool), mock.patch("torch._inductor.memory.reorder_for_peak_memory", reverse):
        for function in (called, torch.compile(called)):
            runs.append([])
            function(X, X)
    assert runs[0] == runs[1] != []


def test_host_routines_for_weights_that_may_vary_run_eagerly() -> None:
    """In a compiled graph a routine could not tell which weight an execution reads."""
    weight, seen = nn.Parameter(torch.randn(8, 8)), list[str]()

    def halve(parts: list[torch.Tensor], context: amanda.OpContext) -> list[torch.Tensor]:
        seen.extend(part.name for part in context.weights.values())
        return [part * 0.5 for part in parts]

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "cat":
            context.insert_before_op(halve, inputs=[0], context=context)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    compiled = torch.compile(lambda x: x @ torch.cat([weight[:2], weight[2:]]), backend="aot_eager")
    refused = pytest.warns(amanda.AmandaWarning, match="may be another one each time")
    with torch.no_grad(), amanda.apply(tool), refused:
        found = compiled(X)
    equal(found, X @ (weight * 0.5))
    assert len(seen) == 2


@pytest.mark.filterwarnings("ignore:The compiled callable")
def test_weights_that_are_made_in_each_step_are_edited_as_in_eager_mode() -> None:
    @amanda.staged
    def halved(weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5

    def analyse(context: amanda.OpContext) -> None:
        if 1 in context.weights:
            context.insert_before_op(halved, inputs=[1])

    def losses(function: Callable[..., torch.Tensor]) -> list[float]:
        tool, found = amanda.Tool(), []
        tool.add_inst_for_op(analyse)
        with amanda.apply(tool):
            for step in range(4):
                weight = torch.full((8, 8), step + 1.0, requires_grad=True)
                loss = function(X, weight)
                loss.backward()
                found += [loss.item(), float(grad_of(weight).sum())]
                del weight, loss
        return found

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight).square().mean()

    expected = losses(step)
    assert losses(torch.compile(step, backend="aot_eager")) == pytest.approx(expected)
    plain = float(F.linear(X, torch.full((8, 8), 1.0)).square().mean())
    assert expected[0] == pytest.approx(plain / 4)
