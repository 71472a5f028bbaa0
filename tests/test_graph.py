"""The graph of PyTorch programs: operators, values, backward operators, and control flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import amanda
from amanda_core import OpContext
from amanda_tools.graph import Graph, Op
from amanda_tools.graph_tracing import GraphTracing

Program = Callable[[], Any]


def trace(program: Program, times: int = 1, **options: Any) -> Graph:
    """The graph of a program that is run so often."""
    tool = GraphTracing(**options)
    with amanda.apply(tool):
        for _ in range(times):
            program()
    [graph] = tool.graphs.values()
    return graph


def named(graph: Graph, name: str) -> Op:
    """The operator of this readable name."""
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
    for order in (slice(None), slice(None, None, -1)):
        tool = GraphTracing()
        with amanda.apply(*(tool, editor)[order]):
            for _ in range(2):
                model(x).sum().backward()
        [graph] = tool.graphs.values()
        assert names(graph.nodes) == names(plain.nodes)
        assert graph.edges == plain.edges
