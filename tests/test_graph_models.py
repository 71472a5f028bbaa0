"""The graph of whole models is that of `torch.export`, and holds more than hooks on modules see.

Normalised are: `x[...]` is one operator in PyTorch, `slice`, `select` and `unsqueeze` in the
exported graph; what returns its input (`contiguous`) is no node there; and an attention mask that
Transformers leaves out where everything is attended is computed there, so its own operators go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTModel,
)

import amanda
from amanda_tools.graph import Graph, GraphTracing

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
IMAGES = {"pixel_values": torch.rand(2, 3, 32, 32)}
#: Name -> model and its arguments.
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]] = {
    "resnet18": (
        lambda: ResNetModel(
            ResNetConfig(
                embedding_size=8,
                hidden_sizes=[8, 16, 16, 16],
                depths=[2, 2, 2, 2],
                layer_type="basic",
            )
        ),
        IMAGES,
    ),
    "bert": (
        lambda: BertModel(BertConfig(vocab_size=50, **SMALL)),
        {"input_ids": torch.ones(2, 8, dtype=torch.long)},
    ),
    "vit": (lambda: ViTModel(ViTConfig(image_size=32, patch_size=8, **SMALL)), IMAGES),
}


def trace(program: Callable[[], Any]) -> Graph:
    tool = GraphTracing()
    with amanda.apply(tool):
        program()
    return tool.result().graph


def exported(model: nn.Module, arguments: dict[str, torch.Tensor]) -> nx.MultiDiGraph:
    """The operators of `torch.export`'s graph."""
    result = nx.MultiDiGraph()
    for node in torch.export.export(model, (), arguments).graph.nodes:
        if node.op != "call_function":
            continue
        result.add_node(node.name, type=node.target.__name__.partition(".")[0])
        for position, value in enumerate(node.args):
            items = enumerate(value) if isinstance(value, (list, tuple)) else [(None, value)]
            for item, one in items:
                if isinstance(one, torch.fx.Node) and one.name in result:
                    result.add_edge(one.name, node.name, input=position, item=item)
    return result


def normalised(graph: nx.MultiDiGraph, outputs: int) -> nx.MultiDiGraph:
    """A graph as the two can be compared; `outputs` is the number of the model's results."""
    graph = graph.copy()
    for edge in [
        (before, after, key)
        for before, after, key, facts in graph.edges(keys=True, data=True)
        if graph.nodes[after]["type"] == "scaled_dot_product_attention" and facts["input"] == 3
    ]:
        graph.remove_edge(*edge)
    while True:
        # What leads nowhere now was the mask's; the model's results are made last.
        ends = [node for node in graph if graph.out_degree(node) == 0][:-outputs]
        if not ends:
            break
        graph.remove_nodes_from(ends)
    kinds = nx.get_node_attributes(graph, "type")
    for node in list(graph):
        if kinds[node] in ("slice", "select", "unsqueeze", "__getitem__"):
            graph.nodes[node]["type"] = "index"
    for node in list(graph):
        before = list(graph.predecessors(node))
        doubled = (
            graph.nodes[node]["type"] == "index"
            and before
            and graph.nodes[before[0]]["type"] == "index"
        )
        if kinds[node] == "contiguous" or doubled:
            for _, after, facts in list(graph.out_edges(node, data=True)):
                for one in before:
                    graph.add_edge(one, after, input=facts["input"], item=facts["item"])
            graph.remove_node(node)
    return graph


def same(one: nx.MultiDiGraph, other: nx.MultiDiGraph) -> bool:
    """Whether there is a bijection that keeps types, and positions of inputs."""
    return bool(
        nx.is_isomorphic(
            one,
            other,
            node_match=lambda a, b: a["type"] == b["type"],
            edge_match=nx.algorithms.isomorphism.categorical_multiedge_match(
                ["input", "item"], [None, None]
            ),
        )
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_that_of_torch_export(name: str) -> None:
    make, arguments = MODELS[name]
    model = make().eval()
    with torch.no_grad():
        graph = trace(lambda: model(**arguments))
        reference = normalised(exported(model, arguments), 1)
    found = normalised(graph.unrolled(), 1)
    assert len(found) == len(reference)
    assert same(found, reference)
    # And the comparison can fail.
    before, after, key = next(iter(found.edges(keys=True)))
    found.remove_edge(before, after, key)
    assert not same(found, reference)


@pytest.mark.parametrize("name", MODELS)
def test_more_is_seen_than_by_hooks_on_modules(name: str) -> None:
    make, arguments = MODELS[name]
    model = make()
    calls = []
    hooks = [
        module.register_forward_hook(lambda *_: calls.append(1))
        for module in model.modules()
        if not list(module.children())
    ]
    model(**arguments)
    for hook in hooks:
        hook.remove()

    def step() -> None:
        model(**arguments)[0].sum().backward()

    graph = trace(step)
    executions = sum(op.executions or 0 for op in graph.ops)
    backward = sum(op.executions or 0 for op in graph.backward_ops)
    print(
        f"{name}: {len(calls)} calls of leaf modules, {executions} operators, {backward} backward"
    )
    assert executions > len(calls)
    assert backward > executions
    # Each operator with a gradient has its backward operators, in the same modules.
    assert all(graph.forward_of(op) or "AccumulateGrad" in op.name for op in graph.backward_ops)
    parameters = {op.name for op in graph.backward_ops if op.type == "AccumulateGrad"}
    used = {name for name, value in model.named_parameters() if value.grad is not None}
    assert parameters == {f"{name}:AccumulateGrad" for name in used}
