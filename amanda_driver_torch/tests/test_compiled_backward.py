"""Backward operators of compiled training, against those of eager mode."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import amanda

from .interceptors import STAYS_COMPILED
from .tensors import equal
from .test_compiled_graphs import graphs

pytestmark = [
    pytest.mark.one_interceptor,
    pytest.mark.usefixtures("fresh_compiler"),
    STAYS_COMPILED,
]

X = torch.linspace(-1, 1, 48).reshape(2, 3, 8)
Routine = Callable[..., Any]


class Watching(amanda.Tool):
    """Looks at all gradients of all backward operators.

    Attributes:
        ops: Name, id and raw name of each backward operator that was analysed.
        seen: Point and name -> sums of the gradients in each execution.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[str, int | None, str]] = []
        self.seen: dict[tuple[str, str], list[list[float | None]]] = {}
        self.add_inst_for_op(self.arrive, backward=True)
        self.add_inst_for_op(self.leave, backward=True, require_outputs=True)

    def arrive(self, context: amanda.OpContext) -> None:
        raw = context.get_backward_op().__name__
        self.ops.append((context.name, context.get_backward_op_id(), raw))
        note = self.noting("arrive", context)
        context.insert_before_backward_op(note, observe=True)

    def leave(self, context: amanda.OpContext) -> None:
        context.insert_after_backward_op(self.noting("leave", context), observe=True)

    def noting(self, point: str, context: amanda.OpContext) -> Routine:
        def note(*gradients: Any) -> None:
            sums = [None if one is None else float(one.double().sum()) for one in gradients]
            self.seen.setdefault((point, context.name), []).append(sums)

        return note


class Net(nn.Module):
    """Operators of one node and of several, in place, views, lists, and one that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(12, 4)
        self.norm, self.batch = nn.LayerNorm(6), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.batch(self.norm(self.first(x))), inplace=True)
        x = torch.cat([x, F.dropout(x.tanh(), 0.0)], -1)
        left, right = x.transpose(1, 2).reshape(2, 36).chunk(2, 1)
        x = (left * right).view(2, 3, 6)
        result: torch.Tensor = self.last(F.pad(x, (0, 6)))
        return result


def trained(
    model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], *tools: amanda.Tool
) -> list[torch.Tensor]:
    """Return the outputs and gradients of three steps of training."""
    found = []
    with amanda.apply(*tools) if tools else contextlib.nullcontext():
        for _ in range(3):
            model.zero_grad()
            output = call(X)
            output.square().sum().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            found += [output.detach(), *(gradient.clone() for gradient in gradients)]
    return found


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("as_function", [False, True])
def test_as_in_eager_mode(backend: str, as_function: bool) -> None:
    """Names, ids, counts and values; no graph is broken, and leaving compiles nothing."""
    model = Net()
    eager, compiled = Watching(), Watching()
    expected = trained(model, model, eager)
    # A module may be called for the first time inside of the graph, which uses its parameters.
    called = (lambda x: model(x)) if as_function else model
    call = torch.compile(called, backend=backend, fullgraph=True)
    plain, before = trained(model, call), graphs()
    breaks = sum(counters["graph_break"].values())
    close(trained(model, call, compiled), expected)
    assert graphs() == before + 1
    assert sum(counters["graph_break"].values()) == breaks
    equal(trained(model, call), plain)
    assert graphs() == before + 1
    assert sorted(compiled.ops) == sorted(eager.ops) != []
    assert compiled.seen.keys() == eager.seen.keys()
    for where, values in eager.seen.items():
        close(compiled.seen[where], values)


def doubling(staged: bool) -> Routine:
    def double(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return gradient * factor

    return amanda.staged(double) if staged else double


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_gradients_of_backward_operators_are_edited(
    backend: str, staged: bool, before: bool
) -> None:
    class Editing(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.analyse, backward=True)

        def analyse(self, context: amanda.OpContext) -> None:
            routine, factor = doubling(staged), torch.tensor(3.0)
            if context.get_backward_op().__name__ != "AddmmBackward0":
                return
            if before:
                context.insert_before_backward_op(routine, grad_outputs=[0], factor=factor)
            else:
                context.insert_after_backward_op(routine, grad_inputs=[2], factor=factor)

    model = Net()
    plain = trained(model, model)
    expected = trained(model, model, Editing())
    call = torch.compile(model, backend=backend, fullgraph=True)
    close(trained(model, call, Editing()), expected)
    assert any(not torch.equal(a, b) for a, b in zip(plain, expected, strict=True))


def refusing(replace: bool) -> amanda.Tool:
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "TanhBackward0":
            context.replace_backward_op(lambda gradient: gradient * 2)

    tool.add_inst_for_op(analyse if replace else lambda context: None, backward=True)
    return tool


def test_a_replacement_of_one_backward_operator_runs_eagerly() -> None:
    model = Net()
    expected = trained(model, model, refusing(True))
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.warns(amanda.AmandaWarning, match="replaces a single backward operator"):
        found = trained(model, call, refusing(True))
    close(found, expected)


def test_other_nodes_of_a_backend_are_refused_by_name() -> None:
    """Their gradients may be at other positions. Here it traces without torch's decompositions."""

    def called(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(model(x), 0.5)

    def backend(gm: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager
        from torch._functorch._aot_autograd import graph_capture_wrappers, graph_compile

        with contextlib.ExitStack() as stack:
            for module in (torch._functorch.aot_autograd, graph_capture_wrappers, graph_compile):
                if hasattr(module, "enable_python_dispatcher"):
                    name = "enable_python_dispatcher"
                    stack.enter_context(mock.patch.object(module, name, contextlib.nullcontext))
            return aot_eager(gm, inputs)

    model, tool = nn.Linear(8, 4), Watching()
    call = torch.compile(called, backend=backend, fullgraph=True)
    with pytest.warns(amanda.AmandaWarning, match="backend differentiates dropout by"):
        trained(model, call, tool)
    assert ("arrive", "linear:AddmmBackward0") in tool.seen


def test_other_nodes_of_a_program_that_runs_are_noted() -> None:
    """A backend without AOTAutograd differentiates as eager mode does."""

    class Noting(Watching):
        def result(self) -> Any:
            return None

    model, tool = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5)), Noting()
    trained(model, torch.compile(model, backend="eager", fullgraph=True), tool)
    assert any("dropout" in line and "MulBackward0" in line for line in tool.not_seen())
    assert ("arrive", "0/linear:AddmmBackward0") in tool.seen


def test_what_an_operator_writes_is_differentiated() -> None:
    """Also by one that returns nothing."""

    def called(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(x) * 1
        y[0] = x[1, :, :4]
        y[1].mul_(2)
        return y

    model, eager, compiled = nn.Linear(8, 4), Watching(), Watching()
    expected = trained(model, called, eager)
    call = torch.compile(called, backend="aot_eager", fullgraph=True)
    close(trained(model, call, compiled), expected)
    assert {raw for _, _, raw in eager.ops} >= {"CopySlices", "AddmmBackward0"}
    counts = [{where: len(one) for where, one in tool.seen.items()} for tool in (eager, compiled)]
    assert counts[0] == counts[1]


def test_routines_find_their_operator_in_the_context() -> None:
    names: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        def look(*_: Any, context: amanda.OpContext) -> None:
            names.append(context.get_backward_op().__name__)

        if context.get_backward_op().__name__ == "TanhBackward0":
            context.insert_before_backward_op(look, observe=True, context=context)

    tool, model = amanda.Tool(), Net()
    tool.add_inst_for_op(analyse, backward=True)
    trained(model, torch.compile(model, backend="aot_eager", fullgraph=True), tool)
    assert names == ["TanhBackward0"] * 3


def test_an_operator_that_is_replaced_on_the_host_runs_eagerly() -> None:
    class Replacing(Watching):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.replace)

        def replace(self, context: amanda.OpContext) -> None:
            if context.op_type == "tanh":
                context.replace_op(lambda x: x * 3)

    model, eager, compiled = Net(), Replacing(), Replacing()
    expected = trained(model, model, eager)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.warns(amanda.AmandaWarning, match="replaced on the host"):
        close(trained(model, call, compiled), expected)
    assert {name for name, _, _ in compiled.ops} == {name for name, _, _ in eager.ops}


def test_random_numbers_are_those_of_plain_compiled_code() -> None:
    """Dropout on a CPU has another node there than in eager mode."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5))
    call, tool = torch.compile(model, backend="aot_eager", fullgraph=True), Watching()
    torch.manual_seed(1)
    plain = trained(model, call)
    torch.manual_seed(1)
    equal(trained(model, call, tool), plain)
    assert "NativeDropoutBackward0" in {raw for _, _, raw in tool.ops}


def test_nothing_is_woven_if_nothing_is_inserted() -> None:
    seen: list[list[str]] = []

    def backend(gm: Any, inputs: Any) -> Any:
        seen.append([str(node.target) for node in gm.graph.nodes])
        return gm

    model = nn.Linear(8, 4)
    call = torch.compile(model, backend=backend, fullgraph=True)
    trained(model, call)
    trained(model, call, refusing(False))
    assert seen[0] == seen[1]


def test_a_routine_without_gradients_runs_with_the_program() -> None:
    """Not while it is compiled. In the aligned view it never runs."""
    calls: Counter[str] = Counter()

    def analyse(context: amanda.OpContext) -> None:
        count = calls.update
        if context.is_backward():
            context.insert_after_backward_op(lambda: count(["raw"]), grad_inputs=[], observe=True)
        else:
            context.insert_before_backward_op(lambda: count(["out"]), grad_outputs=[], observe=True)
            context.insert_after_backward_op(lambda: count(["in"]), grad_inputs=[], observe=True)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    tool.add_inst_for_op(analyse, backward=True)
    counts = []
    for compile_it in (False, True):
        model = nn.Sequential(nn.Tanh())
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compile_it else model
        calls.clear()
        with amanda.apply(tool):
            for _ in range(3):
                call(X.clone().requires_grad_()).sum().backward()
        counts.append({**calls})
    assert counts[0] == counts[1] != {}


class Mistake(Exception):
    pass


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("where", ["analysis", "routine"])
def test_exceptions_keep_their_type(backend: str, where: str) -> None:
    def fail(*_: Any) -> None:
        raise Mistake

    def analyse(context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "TanhBackward0":
            if where == "analysis":
                fail()
            context.insert_before_backward_op(fail, observe=True)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse, backward=True)
    model = Net()
    call = torch.compile(model, backend=backend, fullgraph=True)
    with pytest.raises(Mistake) as caught:
        trained(model, call, tool)
    assert "TanhBackward0" in "".join(caught.value.__notes__)
    trained(model, call)


def test_backward_after_the_tools_have_left() -> None:
    model, tool = Net(), Watching()
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    expected = trained(model, call)
    model.zero_grad()
    with amanda.apply(tool):
        output = call(X)
    with pytest.warns(amanda.AmandaWarning, match="after `apply`"):
        output.square().sum().backward()
    equal([p.grad for p in model.parameters()], expected[1:9])
    assert tool.seen == {}


class Making(nn.Module):
    """Makes modules while it runs, one of them around another that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.Softmax(-1)(nn.Sequential(self.first, nn.Tanh())(x))
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        loss = criterion(x.view(6, 6), torch.arange(6))
        result: torch.Tensor = loss + nn.MSELoss(reduction="sum")(x, torch.zeros(2, 3, 6))
        return result


def test_modules_that_the_program_makes() -> None:
    """Operators in them are those of eager mode, and a compiler gets the same graph."""
    model, eager, compiled = Making(), Watching(), Watching()
    stacks: list[list[Any]] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        stacks.append([n.meta.get("nn_module_stack") for n in gm.graph.nodes if n.op != "output"])
        return gm

    trained(model, model, eager)
    trained(model, torch.compile(model, backend="aot_eager", fullgraph=True), compiled)
    assert Counter(compiled.ops) == Counter(eager.ops)
    for name in ("Softmax", "CrossEntropyLoss", "MSELoss"):
        assert any(f"<{name}>" in one for one, _, _ in compiled.ops)
    call = torch.compile(model, backend=backend, fullgraph=True)
    trained(model, call)

    class Nothing(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(lambda context: None)

    trained(model, call, Nothing())
    plain, inside = ([set(stack or ()) for stack in one] for one in stacks)
    assert inside == plain


def test_dynamo_is_disabled_once_in_code_with_gradients() -> None:
    """It is so in what a backend made, without tools and with those that insert nothing."""

    class Nothing(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(lambda context: None, backward=True)

    model = nn.Linear(8, 6)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)

    def disabled() -> int:
        names: Counter[str] = Counter()

        def count(frame: Any, event: str, _: Any) -> None:
            names[frame.f_code.co_qualname] += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            call(X).sum().backward()
        finally:
            sys.setprofile(before)
        return names["DisableContext.__call__.<locals>._fn"]

    trained(model, call)
    plain = disabled()
    with amanda.apply(Nothing()):
        for _ in range(3):
            call(X).sum().backward()
        assert disabled() == plain > 0
