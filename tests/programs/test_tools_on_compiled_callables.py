"""Tools on compiled callables: the same results as in eager mode, and what they are of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stays_compiled import STAYS_COMPILED
from torch import nn

import amanda
from amanda_driver_torch.compiled import callbacks
from amanda_tools.dump import Dump
from amanda_tools.faults import InjectFaults
from amanda_tools.fingerprint import Fingerprint
from amanda_tools.flops import Flops
from amanda_tools.gating import PruneChannels
from amanda_tools.graph import GraphTracing
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory
from amanda_tools.nonfinite import NonFinite
from amanda_tools.prune import Prune, PruneNM, PruneTiles
from amanda_tools.quantize import Quantize
from amanda_tools.sensitivity import Sensitivity
from amanda_tools.sparsity import Sparsity
from amanda_tools.steer import Steer

EAGERLY = pytest.mark.filterwarnings("ignore:Compiled callables run eagerly")

NOTE = "compiled callables ran eagerly: these are the operators of the eager program"


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))


def notes(make: Callable[[], Any], *calls: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    tool, x = make(), torch.ones(2, 8)
    with amanda.apply(tool):
        for call in calls:
            call(x).sum().backward()  # type: ignore[no-untyped-call]
    found: list[str] = tool.result().notes
    return found


@EAGERLY
@pytest.mark.parametrize("make", [Latency, Memory, Flops, GraphTracing])
def test_they_say_that_it_ran_eagerly(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMANDA_TORCH_COMPILED", "eager")
    compiled = torch.compile(network(), backend="eager")
    assert NOTE in notes(make, compiled)
    assert NOTE in notes(make, network(), compiled)
    assert NOTE not in notes(make, network())


@EAGERLY
def test_only_operators_of_compiled_callables_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMANDA_TORCH_COMPILED", "eager")
    marked: dict[str, bool] = {}

    class Marks(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.analyse, backward=False)
            self.add_inst_for_op(lambda context: None, backward=True)

        def analyse(self, context: amanda.OpContext) -> None:
            marked[context.op_type] = context.get("not_compiled", False)

    compiled = torch.compile(lambda x: torch.tanh(x), backend="eager")
    with amanda.apply(Marks()):
        x = torch.ones(2).exp()
        torch.sin(compiled(x))
    assert marked == {"exp": False, "tanh": True, "sin": False, "ones": False}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(torch.relu(self.first(x)))
        return output


def trained(tool: amanda.Tool, folder: Path, compile_it: bool) -> list[torch.Tensor]:
    """Return the outputs and parameters of four steps of training."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net()
    if compile_it:
        net.compile(backend="aot_eager", fullgraph=True)
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.1), []
    with amanda.apply(tool):
        for step in range(4):
            x = torch.linspace(-step, 2, 64).reshape(4, 16)
            output = net(x)
            output.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(output.detach())
    return [*found, *(parameter.detach() for parameter in net.parameters())]


#: Tool -> how it is made.
TOOLS: dict[str, Callable[[Path], amanda.Tool]] = {
    "flops": lambda folder: Flops(),
    "latency": lambda folder: Latency(warmup=0),
    "memory": lambda folder: Memory(),
    "graph": lambda folder: GraphTracing(),
    "nonfinite": lambda folder: NonFinite(),
    "fingerprint": lambda folder: Fingerprint(folder=folder),
    "sparsity": lambda folder: Sparsity(gradients=True),
    "dump": lambda folder: Dump(folder=folder, values=["outputs", "gradients"]),
    "faults": lambda folder: InjectFaults(rate=0.05),
    "faults in weights": lambda folder: InjectFaults(site="weight", rate=0.05),
    "prune": lambda folder: Prune(0.5),
    "prune together": lambda folder: Prune(0.5, scope="global"),
    "prune in steps": lambda folder: Prune(0.5, steps=2),
    "prune by Taylor's score": lambda folder: Prune(0.5, score="taylor"),
    "prune 2:4": lambda folder: PruneNM(),
    "prune tiles": lambda folder: PruneTiles(0.5),
    "prune channels": lambda folder: PruneChannels(),
    "quantize": lambda folder: Quantize(),
    "quantize dynamically": lambda folder: Quantize("dynamic"),
    "quantize, learned": lambda folder: Quantize("lsq"),
}


@pytest.mark.slow
@pytest.mark.one_interceptor
@STAYS_COMPILED
@pytest.mark.filterwarnings("ignore:Quantize")
@pytest.mark.filterwarnings("ignore:.*gets no value that requires a gradient")  # If learned.
@pytest.mark.parametrize("name", TOOLS)
def test_bits_of_eager_mode(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    tools = [TOOLS[name](tmp_path / mode) for mode in ("eager", "compiled")]
    expected = trained(tools[0], tmp_path, compile_it=False)
    found = trained(tools[1], tmp_path, compile_it=True)
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)


def _executions(result: Any) -> Any:
    return sorted((op.name, op.phase, op.calls) for op in result.ops)


def _operators(result: Any) -> Any:
    ops = (op for graph in result.graphs for op in (*graph.ops, *graph.backward_ops))
    return sorted((op.name, op.id, op.word or "") for op in ops)


def _measured(result: Any) -> Any:
    return [(one.name, one.kind, one.executions, one.elements, one.zeros) for one in result.tensors]


def _dumped(result: Any) -> Any:
    return sorted((op.name, op.calls) for op in result.index.ops), len(result.index.tensors)


#: Tool -> what its result says of training, however the program is run.
FIGURES: dict[str, Callable[[Any], Any]] = {
    "flops": lambda result: result.figures(),
    "latency": _executions,
    "memory": _executions,
    "graph": _operators,
    "nonfinite": lambda result: (result.checked, result.faults),
    "fingerprint": lambda result: [(s.executions, s.values) for s in result.steps],
    "sparsity": _measured,
    "dump": _dumped,
}


@pytest.mark.one_interceptor
@STAYS_COMPILED
@pytest.mark.parametrize("name", FIGURES)
def test_figures_of_compiled_training_are_those_of_eager_mode(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    figures = []
    for compile_it in (False, True):
        tool: Any = TOOLS[name](tmp_path / str(compile_it))
        trained(tool, tmp_path, compile_it)
        result = tool.result()
        figures.append(FIGURES[name](result))
        assert NOTE not in (getattr(result, "notes", None) or ())
    assert figures[0] == figures[1]
    assert figures[0]


@pytest.mark.slow
@pytest.mark.one_interceptor
@STAYS_COMPILED
@pytest.mark.parametrize("make", [Latency, Memory, Flops, GraphTracing])
def test_they_say_what_they_measured(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    found = notes(lambda: make(backward=False), torch.compile(network(), backend="eager"))
    assert any("before the compiler fuses" in note for note in found)
    assert NOTE not in found


@pytest.mark.slow
@pytest.mark.one_interceptor
@STAYS_COMPILED
@pytest.mark.parametrize("make", [Latency, Memory, Flops, GraphTracing])
def test_inference_stays_compiled_under_tools_for_backward_operators(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    net, x, ops = network(), torch.ones(2, 8), []
    expected = net(x)
    compiled = torch.compile(lambda v: net(v), backend="eager", fullgraph=True)
    for call in (net, compiled):
        with torch.no_grad(), amanda.apply(tool := make()):
            assert torch.equal(call(x), expected)
        result = tool.result()
        graphs = result.graphs if hasattr(result, "graphs") else [result]
        ops.append([op.name for graph in graphs for op in graph.ops])
    assert ops[0] == ops[1] != []
    assert any("before the compiler fuses" in note for note in tool.result().notes)
    assert NOTE not in tool.result().notes


@pytest.mark.one_interceptor
@STAYS_COMPILED
@pytest.mark.parametrize("make", [Latency, Memory, GraphTracing])
def test_training_stays_compiled_if_tools_do_without_its_backward_operators(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    monkeypatch.setenv("AMANDA_TORCH_COMPILED", "forward")
    net, x, ops = network(), torch.ones(2, 8), []
    for call in (net, torch.compile(lambda v: net(v), backend="eager", fullgraph=True)):
        with amanda.apply(tool := make()):
            call(x).sum().backward()
        result = tool.result()
        graphs = result.graphs if hasattr(result, "graphs") else [result]
        ops.append([(op.name, op.namespace) for graph in graphs for op in graph.ops])
    eager, compiled = ops
    inside = [name for name, space in compiled if space.endswith("/compiled")]
    assert inside == [name for name, _ in eager][: len(inside)] != []
    (unseen,) = [note for note in tool.result().notes if "compiled training" in note]
    assert "backward operators: AMANDA_TORCH_COMPILED=forward is set" in unseen
    assert NOTE not in tool.result().notes


@pytest.mark.slow
@pytest.mark.one_interceptor
@STAYS_COMPILED
def test_the_graph_is_that_of_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    graphs = []
    for compile_it in (False, True):
        tool = GraphTracing(backward=False)
        net, x = network(), torch.ones(2, 8)
        call = torch.compile(lambda v, net=net: net(v), backend="eager", fullgraph=True)
        with amanda.apply(tool):
            (call if compile_it else net)(x)
        (graph,) = tool.result().graphs
        graphs.append(graph)
    eager, compiled = graphs
    assert [op.name for op in compiled.ops] == [op.name for op in eager.ops]
    assert [(e.producer, e.output, e.consumer, e.input) for e in compiled.edges] == [
        (e.producer, e.output, e.consumer, e.input) for e in eager.edges
    ]


@pytest.mark.one_interceptor
@STAYS_COMPILED
@pytest.mark.parametrize("make", [lambda: Prune(0.5), lambda: PruneNM(2, 4)])
def test_pruning_a_function_that_writes_a_tensor_outside_of_modules(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the cache of a model that generates text."""
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    weight, inputs = torch.randn(4, 4), torch.randn(3, 1, 4)
    results = []
    for compile_it in (False, True):
        cache = torch.zeros(3, 4)

        def keep(x: torch.Tensor, at: torch.Tensor, cache: torch.Tensor = cache) -> torch.Tensor:
            cache.index_copy_(0, at, x @ weight)
            return cache.sum(0)

        called = torch.compile(keep, backend="eager", fullgraph=True) if compile_it else keep
        with amanda.apply(make()) as handle:
            found = [called(x, torch.tensor([at])) for at, x in enumerate(inputs)]
            gaps = [gap.what for gap in handle.coverage()["pytorch"]]
        assert "compiled callables" not in gaps
        results.append([*found, cache])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


class Broken(nn.Module):
    """A network that is compiled in two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        result: torch.Tensor = self.last(x)
        return result


@pytest.mark.one_interceptor
@STAYS_COMPILED
@pytest.mark.parametrize("before", [False, True], ids=["first-called-inside", "ran-before"])
@pytest.mark.parametrize(
    "make", [lambda: PruneTiles(0.5, tile=16), lambda: Prune(0.5, scope="global")]
)
def test_tools_change_their_edits_inside_a_call(
    make: Callable[[], Any], before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These decide in the second step, which begins where the compiled function calls a model."""
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    model, x, results = Broken(), torch.randn(4, 32), []

    def function(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x) * 2
        return result

    for call in (function, torch.compile(function, backend="aot_eager")):
        with torch.no_grad():
            if before:
                call(x)
            with amanda.apply(make()):
                results.append([call(x) for _ in range(3)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
    assert not torch.equal(results[0][1], function(x))


@pytest.mark.one_interceptor
@STAYS_COMPILED
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_warm_call_does_not_ask_dynamo_again(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    compiled, x = torch.compile(network(), backend="aot_eager"), torch.ones(2, 8)
    asked: list[str] = []
    # Profilers do not see what Dynamo calls.
    answer = callbacks._Callback.__call__

    def ask(callback: Any, frame: Any, *arguments: Any) -> Any:
        asked.append(frame.f_code.co_qualname)
        return answer(callback, frame, *arguments)

    monkeypatch.setattr(callbacks._Callback, "__call__", ask)

    def step() -> None:
        output = compiled(x)
        if training:
            output.sum().backward()

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: None)
    with amanda.apply(tool), torch.set_grad_enabled(training):
        for _ in range(3):
            step()
        assert asked
        asked.clear()
        step()
    assert asked == []


@pytest.mark.one_interceptor
@STAYS_COMPILED
@pytest.mark.parametrize("dynamic", [False, True])
def test_flops_of_several_shapes(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    call = torch.compile(nn.Linear(4, 3), backend="eager", dynamic=dynamic)
    rows, tool = (2, 3, 5), Flops(backward=False)
    with amanda.apply(tool), torch.no_grad():
        for n in rows:
            call(torch.ones(n, 4))
    assert tool.result().macs == sum(n * 4 * 3 for n in rows)


@pytest.mark.one_interceptor
@STAYS_COMPILED
@pytest.mark.filterwarnings("ignore:Quantize")
def test_calibration_of_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of modules each execution is a run, compiled or not."""
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    weight, inputs, found = torch.randn(4, 8), torch.randn(4, 3, 8), []

    def function(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, weight)

    for compile_it in (False, True):
        tool = Quantize(calibration=2)
        call = torch.compile(function, backend="eager", fullgraph=True) if compile_it else function
        with amanda.apply(tool):
            found.append([call(x) for x in inputs])
    assert all(map(torch.equal, *found))
    assert not torch.equal(found[1][-1], function(inputs[-1]))


@pytest.mark.slow
@pytest.mark.one_interceptor
@STAYS_COMPILED
def test_sensitivity_of_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    net, x, found = network(), torch.randn(6, 8), []
    for compile_it in (False, True):
        tool = Sensitivity()
        with amanda.apply(tool):
            call = torch.compile(net, backend="aot_eager", fullgraph=True) if compile_it else net
            call(x).square().sum().backward()
        found.append(
            {
                op.name.removeprefix("_orig_mod."): (op.output_sqnr, op.damage)
                for op in tool.result().ops
            }
        )
    eager, compiled = found
    assert list(compiled) == list(eager)
    assert list(compiled.values()) == [pytest.approx(one, rel=1e-4) for one in eager.values()]
    assert None not in sum(eager.values(), ())


class Copying(nn.Module):
    """Multiplies by a copy of a weight."""

    def __init__(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.copy = nn.Parameter(torch.randn(8, 8)), copy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.copy(self.weight))


COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "concatenated": lambda w: torch.cat([w, w]),
    "converted": lambda w: w.to(torch.float64).float(),
    "transposed": lambda w: w.t().contiguous().t(),
    "a view": lambda w: w.t()[:4].t()[:6, :].unsqueeze(0)[0].repeat(1, 2),
    "cloned": lambda w: w.clone(),
}


@pytest.mark.slow
@pytest.mark.one_interceptor
@STAYS_COMPILED
@pytest.mark.filterwarnings("ignore:Quantize")
@pytest.mark.filterwarnings("ignore:.*asks for a weight that may be another one")  # Pruning `cat`.
@pytest.mark.parametrize("make", [Quantize, lambda: Prune(0.5), PruneNM])
@pytest.mark.parametrize("name", COPIES)
def test_copies_of_weights_are_followed(
    name: str, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", "native")
    net, x, found = Copying(COPIES[name]), torch.randn(3, 8), []
    for compile_it in (False, True):
        torch._dynamo.reset()
        call = torch.compile(net, backend="aot_eager") if compile_it else net
        tool = make()
        with amanda.apply(tool):
            outputs = [call(x).detach() for _ in range(3)]
        found.append((outputs, tool.result().reached, len(tool.result().unreached)))
    eager, compiled = found
    assert all(map(torch.equal, compiled[0], eager[0]))
    assert compiled[1:] == eager[1:]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.last(nn.functional.gelu(self.first(x)))
        return found


@STAYS_COMPILED
@pytest.mark.parametrize(
    "make",
    [
        amanda.Tool,
        lambda: Prune(0.5),
        PruneNM,
        lambda: PruneTiles(0.5, tile=2),
        Quantize,
        lambda: Steer("add", vector=[1.0] * 8, ops=["gelu"]),
    ],
    ids=["nothing", "prune", "prune_nm", "prune_tiles", "quantize", "steer"],
)
def test_layers_alike_share_one_graph(make: Callable[[], amanda.Tool]) -> None:
    def run(backend: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer() for _ in range(12)))
        for layer in model if backend else ():
            layer.compile(backend=backend)
        with amanda.apply(make()), torch.no_grad():
            return [model(torch.full((2, 8), 0.1 * step)) for step in range(3)]

    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = run(backend)
    for a, b in zip(compiled, run(None), strict=True):
        torch.testing.assert_close(a, b)
    assert len(graphs) == 1
