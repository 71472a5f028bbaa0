"""Callables under torch.compile that stay compiled while tools are applied.

Long, since it is a list of programs and what must hold for each.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import amanda
from amanda_core.errors import ConfigError
from amanda_core.testing.kit.tools import watching

from .interceptors import STAYS_COMPILED
from .tensors import equal
from .test_compiled_callables import WHOLE

pytestmark = [
    pytest.mark.one_interceptor,
    pytest.mark.usefixtures("fresh_compiler"),
    STAYS_COMPILED,
]

X = torch.linspace(-1, 1, 40).reshape(5, 8)


def graphs() -> int:
    """Return how many graphs were compiled so far."""
    return int(counters["stats"]["unique_graphs"])


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return torch.softmax(x, -1) + self.helped(x)

    def helped(self, x: torch.Tensor) -> Any:
        return F.softmax(F.relu(x).mT, 0).mT


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(self.inner(x))[0] * 2


class Recorder(amanda.Tool):
    """Records what it is shown of operators, and when its routines run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, ...]] = []
        self.runs: list[tuple[str, Any]] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        name = context.name
        self.ops.append(
            (
                *(name, context.get_op_id(), context["type"], context.module_path, context.source),
                *(context.input_names, [type(v) is nn.Parameter for v in context.get_inputs()]),
            )
        )
        context.insert_before_op(lambda *_: self.runs.append(("before", name)), observe=True)
        context.insert_after_op(lambda *_: self.runs.append(("after", name)))
        if context.op_type in ("linear", "relu"):
            context.insert_before_backward_op(
                lambda g: self.runs.append((name, g.shape)), grad_outputs=[0]
            )
            context.insert_after_backward_op(lambda g: g * 0.5, grad_inputs=[0])
        if context.op_type == "linear":
            context.insert_before_op(lambda weight: weight * 0.5, inputs=[1])


def trained(called: Any, net: nn.Module, tool: amanda.Tool) -> list[torch.Tensor]:
    found = []
    with amanda.apply(tool):
        for _ in range(2):
            x = X.clone().requires_grad_()
            out = called(x)
            gradients = torch.autograd.grad(out, [x, *net.parameters()], torch.ones_like(out))
            found += [out.detach(), *gradients]
    return found


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_as_in_eager_mode(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    called = torch.compile(net, backend=backend, fullgraph=True)
    plain = called(X)
    compiled, eager = Recorder(), Recorder()
    got, before = trained(called, net, compiled), graphs()
    equal(called(X), plain)
    assert graphs() == before, "leaving recompiles"
    monkeypatch.setenv("AMANDA_TORCH_COMPILED", "eager")
    with pytest.warns(amanda.AmandaWarning, match="eagerly"):
        expected = trained(called, net, eager)
    equal(got, expected)
    assert compiled.ops == eager.ops
    assert compiled.runs == eager.runs


class Both(Recorder):
    """A recorder that watches backward operators, too."""

    def __init__(self) -> None:
        super().__init__()
        self.backward: list[str] = []
        self.add_inst_for_op(lambda context: self.backward.append(context.name), backward=True)


def test_tools_may_do_without_the_backward_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    called = torch.compile(net, backend="eager", fullgraph=True)
    expected, alone = trained(called, net, Recorder()), Recorder()
    trained(called, net, alone)
    monkeypatch.setenv("AMANDA_TORCH_COMPILED", "forward")
    both = Both()
    equal(trained(called, net, both), expected)
    assert (both.ops, both.runs, both.backward) == (alone.ops, alone.runs, [])
    with amanda.apply(both) as applied:
        called(X)
        gaps = [gap.what for gap in applied.coverage()["pytorch"]]
    assert "backward operators of compiled callables" in gaps


def test_a_setting_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMANDA_TORCH_COMPILED", "no")
    with (
        pytest.raises(ConfigError, match="must be one of graph, forward, eager"),
        amanda.apply(Recorder()),
    ):
        pass


class Prune(amanda.Tool):
    def __init__(self) -> None:
        super().__init__()
        self.masks: list[torch.Tensor] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.op_type == "linear":
            weight = context.get_inputs()[1]
            self.masks.append((weight.abs() > weight.abs().median()).float())
            context.insert_before_op(self.prune, inputs=[1], mask=self.masks[-1])

    @staticmethod
    @amanda.staged
    def prune(weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return weight * mask


def pruned(net: nn.Sequential, masks: list[torch.Tensor]) -> torch.Tensor:
    first, last = net[0], net[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    hidden = F.relu(F.linear(X, first.weight * masks[0], first.bias))
    return F.linear(hidden, last.weight * masks[1], last.bias)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_masks_change_without_another_compilation(backend: str) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    called, tool = torch.compile(net, backend=backend, fullgraph=True), Prune()
    by_hand = torch.compile(lambda masks: pruned(net, masks), backend=backend, fullgraph=True)
    plain, before = called(X), graphs()
    with amanda.apply(tool):
        called(X)
        assert graphs() == before + 1
        for seed in range(100):
            generator = torch.Generator().manual_seed(seed)
            tool.masks[0].bernoulli_(0.5, generator=generator)
            got = called(X)
            with amanda.disabled():
                equal(got, by_hand(tool.masks))
        with amanda.disabled():
            equal(called(X), plain)
    count = graphs()
    equal(called(X), plain)
    with amanda.apply(tool):
        equal(called(X), got)
    equal(called(X), plain)
    assert graphs() == count == before + 2
    assert len(tool.masks) == 2


@pytest.mark.slow
def test_reduced_overhead() -> None:
    """On a CPU there are no CUDA graphs, and the way to them is the same."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    called, tool = torch.compile(net, mode="reduce-overhead", fullgraph=True), Prune()
    with torch.no_grad():
        plain, before = called(X), graphs()
        with amanda.apply(tool) as handle:
            got = called(X)
            gaps = [gap.what for gap in handle.coverage()["pytorch"]]
        equal(called(X), plain)
        torch.testing.assert_close(got, pruned(net, tool.masks))
    assert graphs() == before + 1
    assert not any(what.startswith("compiled callable") for what in gaps)


@pytest.mark.slow
@pytest.mark.parametrize("chosen_by", ["mode", "options", "config"])
def test_no_cuda_graph_records_a_routine_on_the_host(
    monkeypatch: pytest.MonkeyPatch, chosen_by: str
) -> None:
    """A replay of a CUDA graph calls no Python, so such a routine would silently be missed."""
    config: Any = torch._inductor.config
    recorded: list[bool] = []
    original: Any = torch._TorchCompileInductorWrapper.__call__

    def compiling(backend: Any, *args: Any, **kwargs: Any) -> Any:
        recorded.append(backend.config.get("triton.cudagraphs", config.triton.cudagraphs))
        return original(backend, *args, **kwargs)

    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", compiling)
    ways: dict[str, dict[str, Any]] = {
        "mode": {"mode": "reduce-overhead"},
        "options": {"options": {"triton.cudagraphs": True}},
        "config": {},
    }
    by_config = {"triton.cudagraphs": True} if chosen_by == "config" else {}
    with config.patch(by_config):
        _check_recordings(recorded, ways[chosen_by])


def _check_recordings(recorded: list[bool], how: dict[str, Any]) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    called = torch.compile(net, fullgraph=True, **how)
    called(X).sum().backward()
    assert set(recorded) == {True}
    for tool, expected in ((Prune(), True), (watching()[1], False)):
        recorded.clear()
        with amanda.apply(tool) as handle:
            called(X).sum().backward()
            gaps = [gap.what for gap in handle.coverage()["pytorch"]]
        assert set(recorded) == {expected}
        assert ("CUDA graphs of compiled callables" in gaps) is not expected
    recorded.clear()
    torch._dynamo.reset()
    called(X).sum().backward()
    assert set(recorded) == {True}


@pytest.mark.slow
def test_a_weight_of_its_own_for_each_module_of_one_class() -> None:
    nets = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2)]
    run = torch.compile(lambda net: net(X), backend="aot_eager", fullgraph=True)
    tool = Prune()
    with amanda.apply(tool):
        got = [run(net) for net in nets] + [run(net) for net in nets]
    masks = [tool.masks[:2], tool.masks[2:]]
    equal(got, [pruned(net, m) for net, m in zip(nets, masks, strict=True)] * 2)


@pytest.mark.filterwarnings("ignore:The compiled callable")
def test_operators_of_a_frame_that_is_refused_are_those_of_eager_mode() -> None:
    def program(x: torch.Tensor) -> Any:
        return torch.relu(x).unsqueeze_(0) + 1

    found: list[dict[str, int]] = []

    def analyse(context: amanda.OpContext) -> None:
        context.insert_after_op(lambda value: None)
        found[-1][context.op_type] = context.op_id

    for run in (program, torch.compile(program, backend="eager")):
        tool = amanda.Tool()
        tool.add_inst_for_op(analyse)
        found.append({})
        with amanda.apply(tool):
            run(X)
    assert found[1] == found[0]
    assert set(found[0]) == {"relu", "unsqueeze_", "add"}


class Lines(amanda.Tool):
    """Records the lines of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str | None] = []
        self.add_inst_for_op(lambda context: self.found.append(context.source))


def test_lines_of_operators_are_those_of_the_program() -> None:
    """Also of those that no line inside of what is compiled calls."""
    net, lines = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), list[list[str | None]]()
    for compile_it in (False, True):
        whole = torch.compile(net, backend="eager") if compile_it else net
        recorder = Lines()
        with amanda.apply(recorder):
            whole(X)
        lines.append(recorder.found)
    eager, compiled = lines
    assert compiled == eager
    assert None not in eager


def test_a_routine_finds_the_weights_in_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    net, found = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), dict[str, list[Any]]()

    def ask(*values: torch.Tensor, context: amanda.OpContext, seen: list[Any]) -> None:
        seen.append([(place, weight.name) for place, weight in context.weights.items()])

    for way in ("eager", "graph"):
        monkeypatch.setenv("AMANDA_TORCH_COMPILED", way)
        called, tool = torch.compile(net, backend="aot_eager"), amanda.Tool()
        seen = found[way] = []

        def analyse(context: amanda.OpContext, seen: list[Any] = seen) -> None:
            if context.op_type == "linear":
                context.insert_before_op(ask, context=context, seen=seen)

        tool.add_inst_for_op(analyse)
        with warnings.catch_warnings(), amanda.apply(tool):
            warnings.simplefilter("ignore", amanda.AmandaWarning)
            called(X), called(X)
    assert found["graph"] == found["eager"] == [[(1, "0.weight"), (2, "0.bias")]] * 2


def test_a_routine_finds_no_other_values_in_its_context() -> None:
    def ask(x: torch.Tensor, context: amanda.OpContext) -> None:
        context.get_inputs()

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_op(ask, inputs=[0], context=context)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool), pytest.raises(amanda.AmandaError, match="only the values that it se"):
        torch.compile(lambda x: F.relu(x), backend="aot_eager")(X)


def test_callables_made_again_and_again_share_their_code() -> None:
    def function(x: torch.Tensor) -> Any:
        return F.relu(x) + 1

    def compiled() -> list[Any]:
        """Return the results of callables with two backends, and the number of their graphs."""
        start = graphs()
        backends = ["eager", "aot_eager"] * 3
        return [*(torch.compile(function, backend=b)(X) for b in backends), graphs() - start]

    plain, (seen, watch) = compiled(), watching()
    assert plain[-1] == 2
    with amanda.apply(watch):
        got = compiled()
    equal(got, plain)
    assert Counter(seen) == {"relu": 6, "add": 6}
    assert compiled()[-1] == 0, "compiled again after the tools were left"


@pytest.mark.parametrize("stance", ["eager_then_compile", "fail_on_recompile"])
def test_a_stance_holds_for_the_code_for_tools(stance: Any) -> None:
    function = torch.compile(lambda x: F.relu(x) + 1, backend="eager", dynamic=False)
    (seen, watch), start, fewer = watching(), graphs(), X[:2]
    plain = function(X)
    with amanda.apply(watch), torch.compiler.set_stance(stance):
        # What was not compiled for the tools is compiled, without a failure.
        got = [function(X) for _ in range(2)]
        if stance == "fail_on_recompile":
            with pytest.raises(RuntimeError, match="recompile"):
                function(fewer)
    equal(got, [plain] * 2)
    assert Counter(seen) == {"relu": 2, "add": 2}
    assert graphs() == start + 2


def test_a_program_that_drops_its_guards() -> None:
    """Its code serves any module, but that for tools serves the one that it was woven for."""
    nets = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2)]
    options: dict[str, Any] = {"guard_filter_fn": lambda guards: [False for _ in guards]}
    run = torch.compile(lambda net: net(X), backend="eager", fullgraph=True, options=options)
    plain, tool, before = [run(net) for net in nets], Prune(), graphs()
    equal(plain, [net(X) for net in nets])
    with amanda.apply(tool):
        got = [run(net) for net in (*nets, *nets)]
    masks = [tool.masks[:2], tool.masks[2:]]
    equal(got, [pruned(net, m) for net, m in zip(nets, masks, strict=True)] * 2)
    equal([run(net) for net in nets], plain)
    assert graphs() == before + 2


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        x = F.relu(self.linear(x))
        torch._dynamo.graph_break()
        return x + 1


class Layers(nn.Module):
    """Calls of its layers are in the code after a break, which Dynamo runs as its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Breaking(), Breaking()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own, after a graph break.
@pytest.mark.parametrize("what", ["function", "model"])
@pytest.mark.parametrize("first", ["compiled", "tool"])
def test_graph_breaks(what: str, first: str) -> None:
    net = Layers()
    model = torch.compile(net, backend="aot_eager")
    function = torch.compile(lambda x: net(x), backend="aot_eager")
    called: Any = model if what == "model" else function
    if first == "compiled":
        called(X)
    tools = Recorder(), Recorder()
    with amanda.apply(tools[0]):
        called(X), called(X)
    with amanda.apply(tools[1]):
        for _ in range(2):
            net(X)
    # Name, type, module path, source, names of inputs, and which of them are parameters. After a
    # break ids are others.
    seen = [[(op[0], *op[2:]) for op in tool.ops] for tool in tools]
    assert seen[0] == seen[1]
    assert [op[3] for op in tools[0].ops[:3]] == ["", "layers.0.linear", "layers.0"]
    assert tools[0].runs == tools[1].runs


@pytest.mark.slow
def test_shapes_may_be_dynamic() -> None:
    net = Net()
    called = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=True)
    seen: list[Any] = []

    def shifted(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return x + 1

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "linear":
            context.insert_before_op(shifted, inputs=[0])

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        called(X)
        before = graphs()
        called(X[:3]), called(X[:2])
    assert graphs() == before
    assert seen == [(5, 8)] * 4 + [(3, 8)] * 4 + [(2, 8)] * 4


@pytest.mark.slow
def test_replaced_operators() -> None:
    @amanda.staged
    def tanh(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "relu":
            context.replace_op(tanh)
        elif context.op_type == "sin":
            context.replace_backward_op(lambda g: g * 3)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    called = torch.compile(lambda x: torch.relu(x).sin(), backend="aot_eager", fullgraph=True)
    x = X.clone().requires_grad_()
    with amanda.apply(tool):
        out = called(x)
        out.sum().backward()
    equal(out, torch.tanh(X).sin())
    torch.testing.assert_close(x.grad, 3 * (1 - torch.tanh(X) ** 2))


@pytest.mark.parametrize("raising", ["analysis", "routine", "backward"])
def test_errors_keep_their_type(raising: str) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError(raising)

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "relu":
            if raising == "analysis":
                fail()
            if raising == "routine":
                context.insert_before_op(fail)
            context.insert_after_backward_op(fail)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    called = torch.compile(lambda x: torch.relu(x).sum(), backend="aot_eager", fullgraph=True)
    x = X.clone().requires_grad_()
    plain = called(x)
    for _ in range(2):
        with pytest.raises(KeyError, match=raising) as caught, amanda.apply(tool):
            called(x).backward()
        assert any("relu" in note for note in caught.value.__notes__)
    equal(called(x), plain)


def test_what_cannot_be_woven_runs_eagerly_with_the_reason() -> None:
    """Here an operator that changes the shape of its argument."""
    called = torch.compile(lambda x: (x * 2).t_() + 1, backend="aot_eager", fullgraph=True)
    plain = called(X)

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "t_":
            context.insert_before_op(lambda v: v - 1)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool) as handle:
        with pytest.warns(amanda.AmandaWarning, match="changes the shape of an argument"):
            got = [called(X)]
        got.append(called(X))
        gaps = [gap.what for gap in handle.coverage()["pytorch"]]
    equal(got, [(X * 2 - 1).t() + 1] * 2)
    assert any("compiled callable" in what for what in gaps)
    equal(called(X), plain)


def test_nested_tensors_run_eagerly() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    called = torch.compile(lambda x: x.sin() * 2, backend="aot_eager", fullgraph=True)
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(lambda value: value + 1))
    with pytest.warns(amanda.AmandaWarning, match="nested tensor"), amanda.apply(tool):
        got = called(nested)
    equal(got.values(), (torch.ones(6, 3).sin() + 1) * 2 + 1)


@pytest.mark.filterwarnings("ignore:The compiled callable")
def test_operators_of_frames_that_run_eagerly_are_marked() -> None:
    @torch.compile(backend="eager")
    def called(x: torch.Tensor) -> Any:
        x = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(x).t_()

    marked: dict[str, set[bool]] = {}

    def analyse(context: amanda.OpContext) -> None:
        if context.namespace.endswith("/eager"):
            marked.setdefault(context.op_type, set()).add("not_compiled" in context)
        if context.op_type == "t_":
            context.insert_before_op(lambda v: v - 1)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    for _ in range(2):
        with amanda.apply(tool):
            torch.tan(called(X))
            tool.invalidate()
            torch.tan(called(X))
    assert marked == {"cos": {True}, "t_": {True}, "tan": {False}}


@pytest.mark.slow
@pytest.mark.parametrize("warm", [True, False], ids=["compiled-before", "first-called-inside"])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_graphs(name: str, warm: bool) -> None:
    make, ops = WHOLE[name]
    called, x = make(), torch.ones(2, 3)
    if warm:
        called(x)
    seen, watch = watching()
    with amanda.apply(watch):
        got = [called(x)]
        with amanda.disabled():
            got.append(called(x))
        got.append(called(x))
        count = graphs()
        got.append(called(x))
    assert seen == ops * 3
    equal(got, [called(x)] * 4)
    assert graphs() == count


@pytest.mark.filterwarnings("ignore:Compiled callables run eagerly")
def test_a_tool_that_analyses_backward_operators_runs_eagerly() -> None:
    called, tool, seen = torch.compile(Net(), backend="eager", fullgraph=True), amanda.Tool(), []
    tool.add_inst_for_op(lambda context: seen.append(context.op_type), backward=True)
    with amanda.apply(tool):
        called(X).sum().backward()
    assert "AddmmBackward0" in seen
    seen.clear()
    with amanda.apply(tool) as handle:
        for _ in range(2):
            with torch.no_grad():
                called(X)
        gaps = [gap.what for gap in handle.coverage()["pytorch"]]
    assert seen == []
    assert not any("compiled callable" in gap for gap in gaps)


@pytest.mark.slow
def test_other_threads_run_without_tools() -> None:
    called = torch.compile(Net(), backend="aot_eager", fullgraph=True)
    plain, tool, found = called(X), Recorder(), []
    with amanda.apply(tool):
        inside = called(X)
        runs = len(tool.runs)
        thread = threading.Thread(target=lambda: found.append(called(X)))
        thread.start()
        thread.join()
    assert len(tool.runs) == runs
    equal(found, [plain])
    assert not torch.equal(inside, plain)


@pytest.mark.slow
def test_an_empty_tool_changes_nothing() -> None:
    called = torch.compile(Net(), backend="aot_eager", fullgraph=True)
    plain = called(X)
    seen, watch = watching()
    with amanda.apply(amanda.Tool()):
        equal(called(X), plain)
    with amanda.apply(watch):
        equal(called(X), plain)
    assert seen.count("linear") == 4


def test_nothing_of_a_tool_is_kept() -> None:
    called, tool = torch.compile(Net(), backend="aot_eager", fullgraph=True), Recorder()
    with amanda.apply(tool):
        called(X)
    gone = weakref.ref(tool)
    del tool
    gc.collect()
    assert gone() is None
    called(X)


@amanda.staged
def _same(first: torch.Tensor, last: torch.Tensor) -> Any:
    return (product := first * last), product


@amanda.staged
def _returned(first: torch.Tensor, last: torch.Tensor) -> Any:
    return last, first


@amanda.staged
def _views(first: torch.Tensor, last: torch.Tensor) -> Any:
    return first.t(), (last * 2).view(8, 8)


@amanda.staged
def _own(first: torch.Tensor, last: torch.Tensor) -> Any:
    return MASK, first * MASK


MASK = (torch.arange(64).reshape(8, 8) % 3).float()
ROUTINES = {f.__name__: f for f in (_same, _returned, _views, _own)}


@pytest.mark.parametrize("routine", ROUTINES)
def test_new_values_that_something_else_refers_to(routine: str) -> None:
    kept: list[torch.Tensor] = []

    @amanda.staged
    def keep(value: torch.Tensor) -> Any:
        kept[:] = [value * 2]
        return kept[0]

    @amanda.staged
    def use(value: torch.Tensor) -> Any:
        return value * kept[0]

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "mm":
            context.insert_before_op(ROUTINES[routine])
            context.insert_after_op(keep)
        if context.op_type == "mul":
            with amanda.autodiff_enabled():
                context.insert_after_op(use)

    def program(a: torch.Tensor, b: torch.Tensor) -> Any:
        product = torch.mm(a, b) * 0.5
        return product.sin_() + a

    results = []
    for called in (program, torch.compile(program, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        tool, given = amanda.Tool(), [torch.randn(8, 8, requires_grad=True) for _ in range(2)]
        tool.add_inst_for_op(analyse)
        with amanda.apply(tool):
            output = called(*given)
        output.square().sum().backward()
        results.append([output.detach(), *(one.grad for one in given)])
    equal(results[1], results[0])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_staged_edit_adds_what_it_computes() -> None:
    """The operators of the graphs are those of a program that computes the same by itself."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0]

    graphs: list[list[str]] = []

    def note(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in gm.graph.nodes if node.op == "call_function"])

        def run(args: list[Any]) -> Any:
            return gm.forward(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(fw_compiler=note, bw_compiler=note)
    weight = torch.randn(8, 8, requires_grad=True)

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "linear":
            context.insert_before_op(amanda.staged(lambda value: value * 2), inputs=[1])

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    torch.compile(lambda x: F.linear(x, Doubled.apply(weight)), backend=backend)(X).sum().backward()
    with amanda.apply(tool):
        torch.compile(lambda x: F.linear(x, weight), backend=backend)(X).sum().backward()
    forward, backward, *found = graphs
    assert found == [forward, backward]
    assert sum("mul" in name for name in forward) == 1


def checkpointed(compile_it: Any) -> Any:
    called = compile_it(Inner())
    return lambda x: checkpoint(called, x, use_reentrant=False, early_stop=False)


def written(compile_it: Any) -> Any:
    def called(x: torch.Tensor) -> Any:
        y = torch.zeros(5, 8)
        torch.ops.amanda_tests.add_(y, 2.0)
        y[:, 0] = x[:, 0]
        return y * x

    return compile_it(called)


def of_unknown_size(compile_it: Any) -> Any:
    return compile_it(lambda x: x[torch.nonzero(x[:, 0] > 0).squeeze(-1)] * 2)


def custom(compile_it: Any) -> Any:
    return compile_it(lambda x: torch.ops.amanda_tests.square(x) * 2)


@torch.library.custom_op("amanda_tests::add_", mutates_args=("x",))
def _add(x: torch.Tensor, value: float) -> None:
    x.add_(value)


@torch.library.custom_op("amanda_tests::square", mutates_args=())
def _square(x: torch.Tensor) -> torch.Tensor:
    return x * x


_square.register_fake(torch.empty_like)
_square.register_autograd(
    lambda ctx, g: g * 2 * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def overridden(compile_it: Any) -> Any:
    # `torch.Tensor` overrides the method in Python.
    return compile_it(lambda x: x.unflatten(-1, (2, 4)) * 2)


def compared(compile_it: Any) -> Any:
    # It takes another path if its arguments are the same tensor.
    attend = nn.MultiheadAttention(8, 2)
    return compile_it(lambda x: attend(x, x, x)[0])


PROGRAMS = [checkpointed, written, of_unknown_size, custom, overridden, compared]


@pytest.mark.parametrize("make", PROGRAMS)
def test_programs_that_stay_compiled(make: Any) -> None:
    """Routines run as often as in eager mode, and values are those of the plain program."""
    runs: list[Counter[str]] = []

    def analyse(context: amanda.OpContext) -> None:
        def run(*_: Any) -> None:
            runs[-1][context.op_type] += 1

        context.insert_after_op(run, observe=True)
        context.insert_before_backward_op(run, grad_outputs=[0], observe=True)

    def trained(compile_it: Any, *tools: amanda.Tool) -> list[Any]:
        torch.manual_seed(0)
        called, x = make(compile_it), X.clone().requires_grad_()
        for tool in tools:
            tool.add_inst_for_op(analyse)
        runs.append(Counter())
        with amanda.apply(*tools):
            y = called(x)
            y.sum().backward()
        return [y.detach(), x.grad]

    graph = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        equal(trained(graph), expected := trained(lambda called: called))
        equal(trained(lambda called: called, amanda.Tool()), expected)
        equal(trained(graph, amanda.Tool()), expected)
    assert runs[2] == runs[3] != Counter()
    assert not any("Generated" in name for name in runs[2])


def test_modules_made_in_a_compiled_callable() -> None:
    """Dynamo continues in code that cannot be hashed."""

    def made(x: torch.Tensor) -> Any:
        return nn.Sequential(*[nn.Linear(8, 8) for _ in range(2)])(x)

    found = []
    for called in (torch.compile(made, backend="eager"), made):
        seen, watch = watching()
        with amanda.apply(watch):
            called(X)
        found.append(seen)
    assert found[0] == found[1] != []


def test_parameters_made_in_a_compiled_callable() -> None:
    called = torch.compile(lambda x: x * nn.Parameter(x), backend="eager", fullgraph=True)
    seen, watch = watching()
    with pytest.warns(amanda.AmandaWarning, match="it makes a parameter"), amanda.apply(watch):
        got = called(X)
    equal(got, X * X)
    assert seen == ["mul"]


def test_modules_are_freed_while_tools_are_applied() -> None:
    def run() -> weakref.ref[nn.Module]:
        inner = nn.Linear(8, 8)

        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: torch.Tensor) -> Any:
                return self.inner(x)

        torch.compile(Outer(), backend="eager")(X)
        return weakref.ref(inner)

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: None)
    with amanda.apply(tool):
        gone = run()
        gc.collect()
        assert gone() is None


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_numbers_that_are_not_constant(backend: str) -> None:
    """Routines get them, and the code is bound to no value of theirs."""

    def scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
        return F.relu(x) * scale

    called = torch.compile(scaled, backend=backend, fullgraph=True, dynamic=True)
    scales: list[float] = []

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "mul":
            context.insert_before_op(scales.append, inputs=[1], observe=True)
            context.insert_after_op(lambda value: value * 2)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    given = [0.5, 1.5, 0.1, -1e30]
    expected = [2 * scaled(X, scale) for scale in given]
    with amanda.apply(tool):
        equal(called(X, given[0]), expected[0])
        before = graphs()
        equal([called(X, scale) for scale in given[1:]], expected[1:])
    assert graphs() == before
    assert scales == given


def test_an_error_of_the_backend_is_the_users_own() -> None:
    def failing(gm: Any, inputs: Any) -> Any:
        raise ValueError("no backend")

    called, tool = torch.compile(lambda x: F.relu(x), backend=failing), amanda.Tool()
    tool.add_inst_for_op(lambda context: None)
    for _ in range(2):
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no backend"):
            called(X)
        with amanda.apply(tool), pytest.raises(Exception, match="no backend") as caught:
            called(X)
        assert caught.type is torch._dynamo.exc.BackendCompilerFailed


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_program_may_keep_its_graph(backend: str) -> None:
    called = torch.compile(lambda x: x * x, backend=backend, fullgraph=True)
    seen, watch = watching()
    for tools in ([], [watch]):
        x = X.clone().requires_grad_()
        with amanda.apply(*tools):
            out = called(x).sum()
            for _ in range(2):
                out.backward(retain_graph=True)
        equal(x.grad, 4 * X)
    assert "mul" in seen
