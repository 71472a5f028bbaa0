"""The graph of PyTorch programs: operators, values, backward operators, and control flow.

Long, since it is a list of programs.
"""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any

import networkx
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import amanda
from amanda_core import OpContext
from amanda_core.errors import UnsupportedError
from amanda_tools.graph import Edge, Graph, GraphTracing, Op, files
from amanda_tools.graph.values import EagerValues

Program = Callable[[], Any]


def trace(program: Program, times: int = 1, **options: Any) -> Graph:
    """Return the graph of a program that runs this many times."""
    tool = GraphTracing(**options)
    with amanda.apply(tool):
        for _ in range(times):
            program()
    [graph] = tool.graphs.values()
    return graph


def named(graph: Graph, name: str) -> Op:
    """Return the operator with this readable name."""
    [found] = [op for op in (*graph.ops, *graph.backward_ops) if op.name == name]
    return found


def names(nodes: Any) -> list[str]:
    return [node.name for node in nodes]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.linear(x)) + x)


def test_forward_and_backward() -> None:
    model = Residual()
    x = torch.ones(2, 4)
    graph = trace(lambda: model(x).sum().backward(), times=2)
    assert names(graph.ops) == ["linear/linear", "norm/layer_norm", "add", "relu", "sum"]
    linear, norm, add, relu, _ = graph.ops
    assert graph.predecessors(add) == [norm]
    assert graph.successors(norm) == [add]
    assert names(graph.sources_of(linear)) == ["linear.input", "linear.weight", "linear.bias"]
    assert [source.kind for source in graph.sources_of(linear)] == [
        "input",
        "parameter",
        "parameter",
    ]
    assert names(graph.sources_of(add)) == ["linear.input"]
    assert {op.executions for op in graph.ops} == {2}
    assert graph.chain(relu, "linear", "layer_norm", "add", "relu") == [linear, norm, add, relu]
    assert graph.chain(relu, "linear", "add", "relu") is None
    # One backward operator of the engine's for each, but for the product two.
    assert [len(graph.backward_of(op)) for op in graph.ops] == [2, 1, 1, 1, 1]
    backward = graph.backward_of(add)[0]
    assert graph.forward_of(backward) is add
    assert graph.predecessors(backward) == graph.backward_of(relu)
    assert graph.successors(backward) == graph.backward_of(norm)
    assert graph.op(add.id) is add
    assert graph.op(backward.id, backward=True) is backward


def test_looking_back_while_tracing() -> None:
    found: dict[str, list[str]] = {}
    tracing = GraphTracing()

    class Dependent(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.depends_on(tracing)
            self.add_inst_for_op(self.analyse)
            self.add_inst_for_op(self.analyse, backward=True)

        def analyse(self, context: OpContext) -> None:
            found[context.name] = names(context["graph"].predecessors(context["graph_op"]))

    model, x = Residual(), torch.ones(2, 4)
    with amanda.apply(Dependent()):
        model(x).sum().backward()
    assert found["add"] == ["norm/layer_norm"]
    assert found["linear/linear"] == []
    assert found["add:AddBackward0"] == ["relu:ReluBackward0"]


def test_values_that_other_tools_change_are_followed() -> None:
    def analyse(context: OpContext) -> None:
        context.insert_before_op(lambda x: x * 2, inputs=[0])
        context.insert_after_op(lambda x: x * 2, outputs=[0])
        context.insert_before_backward_op(lambda g: g * 2, grad_outputs=[0])
        context.insert_after_backward_op(lambda g: g * 2, grad_inputs=[0])

    editor = amanda.Tool()
    editor.add_inst_for_op(analyse)
    model, x = Residual(), torch.ones(2, 4, requires_grad=True)
    plain = trace(lambda: model(x).sum().backward(), times=2)
    for first in (True, False):
        tool = GraphTracing()
        with amanda.apply(*((tool, editor) if first else (editor, tool))):
            for _ in range(2):
                model(x).sum().backward()
        [graph] = tool.graphs.values()
        assert names(graph.nodes) == names(plain.nodes)
        assert graph.edges == plain.edges


def edges(graph: Graph, op: Op) -> list[tuple[Any, ...]]:
    """Return what an operator takes: producer, its output, input and item, and the kind."""
    return [
        (graph.nodes[edge.producer].name, edge.output, edge.input, edge.item, edge.kind)
        for edge in graph.edges_into(op)
    ]


# Control flow.


def test_loop() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.tanh(self.cell(x))
            return x

    model, x = Recurrent(), torch.ones(2, 3, requires_grad=True)
    graph = trace(lambda: model(x).sum().backward())
    cell = named(graph, "cell/linear")
    assert cell.executions == 3
    first, *later = graph.edges_into(cell, 0)
    assert (graph.nodes[first.producer].name, first.first, first.executions) == ("cell.input", 0, 1)
    # Each round has a tanh of its own, since the activation of the module counts.
    tanh = [op for op in graph.ops if op.type == "tanh"]
    assert [edge.producer for edge in later] == [op.index for op in tanh[:2]]
    assert [edge.first for edge in later] == [1, 2]
    assert [edge.back for edge in (first, *later)] == [False, True, True]
    calls = graph.unrolled()
    assert [node for node in calls if node[0] == cell.index] == [(cell.index, n) for n in range(3)]
    chain = [(cell.index, 0), (tanh[0].index, 0), (cell.index, 1), (tanh[1].index, 0)]
    assert all(calls.has_edge(*pair) for pair in itertools.pairwise(chain))
    # The gradient goes the same way back: the parameter's is summed up over the rounds.
    gradient = next(op for op in graph.backward_of(cell) if op.type == "AddmmBackward0")
    assert gradient.executions == 3
    before = {graph.forward_of(op) for op in graph.predecessors(gradient)}
    assert [op in before for op in tanh] == [True] * 3


def test_branches_of_later_steps() -> None:
    model = Residual()
    x = torch.ones(2, 4)
    steps = iter([False, True, False])

    def step() -> None:
        y = model(x)
        if next(steps):
            y = y.exp()
        y.sum().backward()

    graph = trace(step, times=3)
    exp, total = named(graph, "exp"), named(graph, "sum")
    assert names(graph.predecessors(exp)) == ["relu"]
    assert (exp.executions, total.executions) == (1, 3)
    assert [
        (graph.nodes[e.producer].name, e.first, e.executions) for e in graph.edges_into(total)
    ] == [
        ("relu", 0, 2),
        ("exp", 1, 1),
    ]
    assert names(graph.successors(named(graph, "sum:SumBackward0"))) == [
        "relu:ReluBackward0",
        "exp:ExpBackward0",
    ]
    assert names(graph.successors(named(graph, "exp:ExpBackward0"))) == ["relu:ReluBackward0"]
    entered = graph.edges_into(named(graph, "relu:ReluBackward0"))
    assert [(edge.first, edge.executions) for edge in entered] == [(0, 2), (1, 1)]
    # It was found after the ops that it leads to, and yet is not a cycle.
    assert not any(edge.back for edge in graph.edges)


def test_a_module_that_is_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.activation = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.activation(x.exp())
            z: torch.Tensor = self.activation(y.neg())
            return z

    model, x = Twice(), torch.ones(2)
    graph = trace(lambda: model(x), times=2)
    relu = named(graph, "activation/relu")
    assert names(graph.predecessors(relu)) == ["exp", "neg"]
    assert [edge.calls for edge in graph.edges_into(relu)] == [[(0, 0), (1, 2)], [(0, 1), (1, 3)]]
    calls = graph.unrolled()
    [start] = [node for node in calls if calls.in_degree(node) == 0 and node[1] == 0]
    types = [calls.nodes[node]["type"] for node in (start, *calls_after(calls, start))]
    assert types == ["exp", "relu", "neg", "relu"]


def calls_after(calls: Any, node: Any) -> Any:
    """Return the nodes of a chain after its first one."""
    after = list(calls.successors(node))
    while after:
        yield after[0]
        after = list(calls.successors(after[0]))


def test_in_place_operators_give_new_versions() -> None:
    def program() -> None:
        x = torch.ones(3)
        y = x.exp()
        x.add_(1)
        torch.relu_(x)
        x.mul(y)

    graph = trace(program)
    assert edges(graph, named(graph, "exp")) == [("ones", 0, 0, None, "value")]
    assert edges(graph, named(graph, "relu_")) == [("add_", 0, 0, None, "value")]
    assert edges(graph, named(graph, "mul")) == [
        ("relu_", 0, 0, None, "value"),
        ("exp", 0, 1, None, "value"),
    ]
    assert named(graph, "add_").writes == [0]
    assert named(graph, "exp").writes == []


def test_writes_through_views() -> None:
    def program() -> None:
        x = torch.ones(3, 3)
        row, untouched = x[0], torch.zeros(3)
        row.add_(1)
        x.sum()
        x.mul_(2)
        row.exp()
        untouched.neg()
        row.copy_(untouched)
        torch.neg(row)

    graph = trace(program)
    # What was written through the view arrives beside what made the tensor, and the other way.
    assert edges(graph, named(graph, "sum")) == [
        ("ones", 0, 0, None, "value"),
        ("add_", 0, 0, None, "alias"),
    ]
    assert edges(graph, named(graph, "exp")) == [
        ("add_", 0, 0, None, "value"),
        ("mul_", 0, 0, None, "alias"),
    ]
    assert edges(graph, named(graph, "neg")) == [("zeros", 0, 0, None, "value")]
    assert edges(graph, named(graph, "neg#2")) == [("copy_", 0, 0, None, "value")]


def test_writes_of_what_is_not_returned() -> None:
    def program() -> None:
        x, out = torch.ones(3), torch.zeros(3)
        x[0] = 5.0
        torch.exp(x, out=out)
        out.neg()

    graph = trace(program)
    assert edges(graph, named(graph, "exp"))[0] == ("__setitem__", 0, 0, None, "value")
    assert edges(graph, named(graph, "neg")) == [("exp", 0, 0, None, "value")]


def test_lists_of_inputs_and_outputs() -> None:
    def program() -> None:
        first, _, third = torch.ones(6).chunk(3)
        values, indices = torch.stack([third, first]).max(dim=0)
        torch.split(values, 1)[1].neg()
        indices.abs()

    graph = trace(program)
    assert edges(graph, named(graph, "stack")) == [
        ("chunk", 2, 0, 0, "value"),
        ("chunk", 0, 0, 1, "value"),
    ]
    assert [str(out) for out in named(graph, "max").outputs] == ["float32[2]", "int64[2]"]
    assert edges(graph, named(graph, "abs")) == [("max", 1, 0, None, "value")]
    assert edges(graph, named(graph, "neg")) == [("split", 1, 0, None, "value")]
    assert names(graph.successors(named(graph, "chunk"), position=1)) == []


def test_an_operator_that_returns_its_input() -> None:
    def program() -> None:
        x = torch.ones(3)
        same = x.contiguous()
        assert same is x
        same.exp()

    graph = trace(program)
    assert edges(graph, named(graph, "exp")) == [("contiguous", 0, 0, None, "value")]
    assert named(graph, "contiguous").writes == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant: bool) -> None:
    model = Residual()
    x = torch.ones(2, 4, requires_grad=True)

    def step(again: bool) -> None:
        # A value of the graph's goes into what is run again.
        y = x * 2
        z = checkpoint(model, y, use_reentrant=reentrant) if again else model(y)
        z.sum().backward()

    def forward(graph: Graph) -> set[tuple[Any, ...]]:
        return {
            (op.type, edge.input, graph.nodes[edge.producer].name)
            for op in graph.ops
            for edge in graph.edges_into(op)
            if edge.kind == "value"
        }

    plain, found = trace(lambda: step(False)), trace(lambda: step(True), times=2)
    inner = ("linear", "layer_norm", "add", "relu")
    for op in found.ops:
        assert op.executions == (4 if op.type in inner else 2), op.name
    # The second run is the same operators on the same values.
    expected = {(kind, at, name) for kind, at, name in forward(plain) if kind in inner}
    assert {(kind, at, name) for kind, at, name in forward(found) if kind in inner} == expected


def test_two_at_once() -> None:
    model, x = Residual(), torch.ones(2, 4)
    tools = GraphTracing(), GraphTracing(everything=True)
    with amanda.apply(*tools):
        # The second one has seen more before.
        torch.ones(3).exp()
        for _ in range(2):
            model(x).sum().backward()
    one, other = (tool.result().graph for tool in tools)
    assert files.to_json(one) == files.to_json(other)
    late = GraphTracing()
    with amanda.apply(tools[0]):
        model(x).sum().backward()
        with amanda.apply(late):
            model(x).sum().backward()
    [found] = late.graphs.values()
    assert [op.kind for op in found.ops] == ["linear", "layer_norm", "add", "relu", "sum"]
    add = named(found, "add:AddBackward0")
    assert names(found.predecessors(add)) == ["relu:ReluBackward0"]


# What it must not do.


def test_no_tensor_is_kept_alive() -> None:
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen: list[weakref.ref[torch.Tensor]] = []
    tool = GraphTracing()
    sizes = []
    with amanda.apply(tool):
        for _ in range(50):
            x = torch.rand(2, 4)
            y = model(x)
            total = y.sum()
            seen += map(weakref.ref, (x, y, total))
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            del x, y, total
            [graph] = tool.graphs.values()
            sizes.append((len(graph.nodes), len(graph.edges)))
        gc.collect()
        assert not any(reference() is not None for reference in seen)
        [values] = tool._values.values()
        assert isinstance(values, EagerValues)
        assert len(values) < 20
    # The first step is the graph.
    assert len(set(sizes)) == 1
    assert {op.executions for op in graph.ops if op.name != "rand"} == {50}
    model_alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert model_alive() is None


def test_the_first_steps_can_be_enough() -> None:
    model, x = Residual(), torch.ones(2, 4)
    tool = GraphTracing().where(amanda.select(steps=range(1)))
    with amanda.apply(tool):
        for _ in range(3):
            model(x).sum().backward()
            amanda.step()
    [graph] = tool.graphs.values()
    assert {op.executions for op in (*graph.ops, *graph.backward_ops)} == {1}
    assert graph.chain(named(graph, "relu"), "linear", "layer_norm", "add", "relu") is not None


def test_only_the_model_is_traced_unless_everything_is_asked_for() -> None:
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    assert {op.zone for op in trace(step).ops} == {"model"}
    graph = trace(step, times=2, everything=True)
    updates = [op for op in graph.ops if op.zone == "optimizer"]
    assert {op.type for op in updates} == {"add_"}
    # The second step reads what the first has written.
    written = {node.index for node in updates}
    assert any(edge.producer in written and edge.back for edge in graph.edges)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.act(self.norm(self.linear(x))).split(2, dim=1)
        y = torch.cat([b, a], dim=1)
        y[0].mul_(2)
        z: torch.Tensor = self.act(y + x)
        return z


def test_both_interceptors_give_the_same_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for interceptor in ("function_mode", "native"):
        monkeypatch.setenv("AMANDA_TORCH_INTERCEPTOR", interceptor)
        model, tool = nn.Sequential(Block(), Block()), GraphTracing()
        try:
            with amanda.apply(tool):
                for _ in range(3):
                    model(torch.rand(3, 4)).sum().backward()
        except UnsupportedError as error:
            pytest.skip(str(error))
        found.append(files.to_json(tool.result().graph))
    assert found[0] == found[1]
    assert len(found[0]["nodes"]) > 30


def test_edges_that_close_cycles_are_those_of_a_search_through_all_nodes() -> None:
    draw = random.Random(0)
    backs = 0
    for _ in range(200):
        graph, count = Graph("pytorch/2.0/eager"), draw.randint(2, 12)
        other: networkx.DiGraph[int] = networkx.DiGraph()
        other.add_nodes_from(range(count))
        for number in range(3 * count):
            producer, consumer = draw.randrange(count), draw.randrange(count)
            edge = graph.connect(Edge(producer, number, consumer, 0))
            assert edge.back is networkx.has_path(other, consumer, producer)
            backs += edge.back
            if not edge.back:
                other.add_edge(producer, consumer)
    assert 100 < backs < 3000
