"""Graphs over PyTorch and TensorFlow's modes: one network, and graphs equal to TensorFlow's own."""

# mypy: allow-untyped-decorators
# TensorFlow has no types.

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch

import amanda
from amanda_core import OpContext
from amanda_core.results import share
from amanda_tools.flops import Flops
from amanda_tools.graph import Graph, GraphTracing, Op, Source
from amanda_tools.latency import Latency
from amanda_tools.memory import Memory

from .models import DENSE, STEPS, assert_same_bits
from .test_builtin_tools import reference
from .test_portable_tools import backends, built_mostly_before, instrumented

v1 = tf.compat.v1


def trace(program: Callable[[], Any]) -> list[Graph]:
    tool = GraphTracing()
    with amanda.apply(tool):
        program()
    return tool.result().graphs


#: What the network is made of; `product` is `linear`, or a product and an addition.
LAYERS = ["conv2d", "relu", "max_pool2d", "conv2d", "relu", "product", "relu", "product"]


def layers_behind(graph: Graph, op: Op) -> list[str]:
    """Return the layers from the first to `op`, following the first input that an operator
    produced.
    """
    found: list[str] = []
    at: Op | None = op
    while at is not None:
        kind = "product" if at.kind in ("linear", "matmul") else at.kind
        if kind in LAYERS:
            found.append(kind)
        before = [edge for edge in graph.edges_into(at) if edge.kind == "value" and not edge.back]
        nodes = [graph.nodes[edge.producer] for edge in before]
        at = next((n for n in nodes if isinstance(n, Op) and n.type != "ReadVariableOp"), None)
    return found[::-1]


@built_mostly_before
@backends
def test_one_network_everywhere(backend: str, inside: bool) -> None:
    tool = GraphTracing()
    record = instrumented(backend, inside, tool)
    assert_same_bits(record, reference(backend, False))
    # Building it runs operators as well, eagerly perhaps.
    [(graph, loss)] = [
        (one, op) for one in tool.graphs.values() for op in one.ops if op.kind == "cross_entropy"
    ]
    assert layers_behind(graph, graph.predecessors(loss)[0]) == LAYERS
    eager = "/eager" in graph.namespace
    products = [op for op in graph.ops if op.kind in ("conv2d", "linear", "matmul")]
    assert [op.executions for op in products] == [STEPS if eager else None] * len(DENSE)
    # The weight of each comes from a parameter, in TensorFlow by an operator that reads it. Built
    # inside it comes from what has made it.
    for op in products if not inside else ():
        sources = graph.sources_of(op)
        for reading in graph.predecessors(op):
            if reading.type in ("ReadVariableOp", "Identity"):
                sources += graph.sources_of(reading)
        assert "parameter" in {source.kind for source in sources}, op.name
    # Each has a gradient for its weight, and all but the first for its input. That is one backward
    # operator or several; the first one's input has a gradient where it is not left out.
    for op in products:
        backward = graph.backward_of(op)
        assert backward
        assert all(graph.forward_of(one) is op for one in backward)
    # Gradients go from the end to the front.
    convolutions = [op for op in products if op.kind == "conv2d"]
    later, earlier = graph.backward_of(convolutions[1]), graph.backward_of(convolutions[0])
    reached = {op.index for op in later}
    for op in graph.backward_ops:
        if any(edge.producer in reached for edge in graph.edges_into(op)):
            reached.add(op.index)
    assert any(op.index in reached for op in earlier)


def assert_is_graph_def(graph: Graph, program: Any) -> None:
    """Check that the graph is TensorFlow's: each input is the tensor that the node names."""
    definition = {node.name: node for node in program.as_graph_def().node}
    # A variable's argument has the variable's name here.
    captured = {
        variable.name.removesuffix(":0"): inner.op.name
        for variable in getattr(program, "variables", ())
        for outer, inner in program.captures
        if outer is variable.handle
    }
    assert {op.name for op in graph.ops} <= definition.keys()
    for node in definition.values():
        named = [op for op in (*graph.ops, *graph.backward_ops) if op.name == node.name]
        if not named:
            assert node.op in ("Const", "Placeholder", "NoOp", "VarHandleOp", *CALLS), node.op
            continue
        [op] = named
        assert op.type == node.op
        expected = [text for text in node.input if not text.startswith("^")]
        edges = graph.edges_into(op)
        found = [(graph.nodes[edge.producer].name, edge.output) for edge in edges]
        names = [f"{captured.get(name, name)}:{at}".removesuffix(":0") for name, at in found]
        assert names == expected, op.name


CALLS = (
    "StatelessWhile",
    "While",
    "StatelessIf",
    "If",
    "PartitionedCall",
    "StatefulPartitionedCall",
)


def network(x: Any, weight: Any) -> Any:
    first, second = tf.split(tf.nn.relu(x @ weight), 2, axis=1)
    return tf.reduce_sum(tf.concat([second, first, first], 1) * 2.0)


def test_a_graph_of_a_session_is_its_graph_def() -> None:
    program = tf.Graph()
    with program.as_default():
        x = v1.placeholder(tf.float32, (2, 3))
        weight = v1.get_variable("w", (3, 4), use_resource=True)
        loss = network(x, weight)
        gradients = tf.gradients(loss, [x, weight])
        session = v1.Session()
        session.run(v1.global_variables_initializer())
    before = [op.name for op in program.get_operations()]

    def run() -> None:
        session.run([loss, gradients], {x: [[1.0] * 3] * 2})

    [graph] = trace(run)
    assert [op.name for op in program.get_operations()] == before
    run_ops = tf.Graph()
    with run_ops.as_default():
        # Of the graph what this run computes: not the initialisation.
        names = [tensor.op.name for tensor in (loss, *gradients)]
        tf.import_graph_def(v1.graph_util.extract_sub_graph(program.as_graph_def(), names), name="")
    assert_is_graph_def(graph, run_ops)
    assert {s.name: s.kind for s in graph.sources if s.kind != "constant"} == {
        "Placeholder": "input",
        "w": "parameter",
    }


def test_a_function_is_its_graph_def() -> None:
    weight = tf.Variable(tf.ones((3, 4)), name="weight")

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = network(x, weight)
        return tape.gradient(loss, weight)

    x, longer = tf.ones((2, 3)), tf.ones((5, 3))
    [graph] = trace(lambda: step(x))
    concrete = step.get_concrete_function(x).graph
    assert_is_graph_def(graph, concrete)
    assert {op.program for op in graph.ops} == {concrete.name}
    assert {s.name: s.kind for s in graph.sources if s.kind != "constant"} == {
        "x": "input",
        "weight": "parameter",
    }
    # Traced again for another shape it is the same operators.
    tool = GraphTracing()
    with amanda.apply(tool):
        step(x)
        step(longer)
    [again] = tool.graphs.values()
    assert [op.name for op in again.ops] == [op.name for op in graph.ops]
    assert len(again.edges) == len(graph.edges)


def test_loops_and_branches_of_graphs_pass_values_on() -> None:
    @tf.function
    def program(x: Any) -> Any:
        for _ in tf.range(3):
            x = tf.nn.relu(x @ tf.ones((3, 3)))
        return tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.exp(x), lambda: tf.sin(x))

    x = tf.ones((2, 3))
    [graph] = trace(lambda: program(x))
    calls = [source for source in graph.sources if source.kind == "call"]
    assert [source.name for source in calls] == ["while", "cond"]
    loop, branch = calls
    assert "x" in {graph.nodes[edge.producer].name for edge in graph.edges_into(loop)}
    assert loop.index in {edge.producer for edge in graph.edges_into(branch)}
    assert {op.type for op in graph.ops} >= {"Relu", "MatMul", "Exp", "Sin", "Sum", "Greater"}
    [total] = [op for op in graph.ops if op.type == "Sum"]
    assert graph.sources_of(total)[0] is loop
    # Each operator belongs to the function that it is in.
    assert len({op.program for op in graph.ops}) == 5


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "function"])
def test_values_that_other_tools_change_are_followed(in_graph: bool) -> None:
    def analyse(context: OpContext) -> None:
        if context["type"] in ("matmul", "relu"):
            context.insert_before_op(lambda x: x * 2, inputs=[0])
            context.insert_after_op(lambda x: x * 2, outputs=[0])
            context.insert_after_backward_op(lambda g: g * 2, grad_inputs=[0])

    editor = amanda.Tool()
    editor.add_inst_for_op(analyse)
    weight, x = tf.Variable(tf.ones((3, 4))), tf.ones((2, 3))

    def step() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = network(x, weight)
        return tape.gradient(loss, [x, weight])

    program = tf.function(step) if in_graph else step
    program()
    [plain] = trace(program)
    tool = GraphTracing()
    with amanda.apply(tool, editor):
        program()
    [graph] = tool.result().graphs
    found, expected = ([op.name for op in one.ops] for one in (graph, plain))
    assert found == expected
    for op, other in zip(graph.ops, plain.ops, strict=True):
        assert [before.name for before in graph.predecessors(op)] == [
            before.name for before in plain.predecessors(other)
        ]
        assert len(graph.sources_of(op)) == len(plain.sources_of(other))


def test_eager_loops_lists_and_constants() -> None:
    x, weight = tf.ones((2, 4)), tf.Variable(tf.ones((4, 4)), name="weight")

    def program() -> None:
        y = x
        for _ in range(3):
            y = tf.nn.relu(y @ weight)
        first, second = tf.split(y, 2, axis=1)
        tf.concat([second, first], 1)

    [graph] = trace(program)
    [product] = [op for op in graph.ops if op.kind == "matmul"]
    [relu] = [op for op in graph.ops if op.kind == "relu"]
    assert product.executions == relu.executions == 3
    first, again = graph.edges_into(product, 0)
    assert isinstance(graph.nodes[first.producer], Source)
    assert (first.executions, first.back) == (1, False)
    assert (again.producer, again.executions, again.first, again.back) == (relu.index, 2, 1, True)
    [split] = [op for op in graph.ops if op.kind == "split"]
    [concat] = [op for op in graph.ops if op.kind == "concat"]
    found = [(edge.producer, edge.output, edge.item) for edge in graph.edges_into(concat, 0)]
    assert found == [(split.index, 1, 0), (split.index, 0, 1)]
    kinds = {source.name: source.kind for source in graph.sources}
    assert kinds["Split.split_dim"] == kinds["ConcatV2.axis"] == "constant"
    assert kinds["weight"] == "parameter"
    calls = graph.unrolled()
    assert sum(node[0] == product.index for node in calls) == 3


@pytest.mark.slow
def test_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard here"
    )
    tool = GraphTracing(formats=["tensorboard"])
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(2, 4)
    with amanda.apply(tool):
        for _ in range(2):
            y = model(x)
            for _ in range(2):
                y = torch.tanh(y)
            y.sum().backward()
    [file] = tool.result().write(tmp_path)
    events = accumulator.EventAccumulator(str(file.parent))
    events.Reload()
    definition, graph = events.Graph(), tool.result().graph
    nodes = {node.name: node for node in definition.node}
    assert len(nodes) == len(definition.node) == len(graph.nodes)
    linear = nodes["0/linear"]
    assert linear.op == "linear"
    assert list(linear.input) == ["input/0.input", "parameter/0.weight", "parameter/0.bias"]
    assert [dim.size for dim in linear.attr["_output_shapes"].list.shape[0].dim] == [2, 4]
    assert linear.attr["executions"].s == b"2"
    assert nodes["1/relu"].input == ["0/linear"]
    # A circle is cut, for the page takes none.
    assert list(nodes["tanh"].input) == ["1/relu"]
    assert any(edge.back for edge in graph.edges)
    # TensorFlow takes it for a graph, the types of its operators aside.
    for node in definition.node:
        assert all(text.partition(":")[0] in nodes for text in node.input)


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_figures_of_tools_that_ran_together(mode: str) -> None:
    """A product of (2, 3) by (3, 4): the same figures, at the operator's node."""
    tools: dict[str, Any] = {
        "graph": GraphTracing(),
        "flops": Flops(),
        "latency": Latency(),
        "memory": Memory(),
    }

    def program(x: Any, weight: Any) -> Any:
        return tf.nn.relu(tf.matmul(x, weight))

    x, weight = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    if mode == "session":
        with tf.Graph().as_default() as graph:
            product = program(v1.placeholder(tf.float32, [2, 3]), tf.constant(weight))
        with amanda.apply(*tools.values()), v1.Session(graph=graph) as session:
            session.run(product, {graph.get_operations()[0].outputs[0]: x})
    else:
        with amanda.apply(*tools.values()):
            (tf.function(program) if mode == "function" else program)(x, weight)
    results = {name: tool.result() for name, tool in tools.items()}
    share(results)
    [found] = [op for graph in results["graph"].graphs for op in graph.ops if op.kind == "matmul"]
    assert found.notes["flops: macs"] == 2 * 3 * 4
    [timed] = [op for op in results["latency"].ops if op.word == "matmul"]
    assert found.notes["latency: self (s)"] == timed.self / 1e9 > 0
    # In graphs it is unknown which buffers are new.
    size = "allocated" if mode == "eager" else "outputs"
    assert found.notes[f"memory: {size} (B)"] == 2 * 4 * 4
