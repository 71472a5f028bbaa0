"""Graphs of whole models equal those of `torch.export`, and contain more than module hooks see.

The graphs are normalized: `x[...]` is one operator in PyTorch, but `slice`, `select` and
`unsqueeze` in the exported graph. An operator that returns its input (`contiguous`) is not a node
there. The export computes an attention mask that Transformers leaves out if everything is attended
to, so the operators of the mask are left out.
"""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel, ResNetConfig, ResNetModel, ViTConfig, ViTModel

import amanda
from amanda_tools.graph import Graph, GraphTracing

from .. import classifiers

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
    """Return the operators of `torch.export`'s graph."""
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
    """Return a graph that can be compared; `outputs` is the number of the model's results."""
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
    """Return True if there is a bijection that preserves types and positions of inputs."""
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


class VGG19(nn.Module):
    """VGG-19 in torchvision's layout, with its dropout."""

    def __init__(self) -> None:
        super().__init__()
        *features, flatten, first, relu, second, last_relu, last = classifiers.vgg19().children()
        assert isinstance(flatten, nn.Flatten)
        self.features, self.pool = nn.Sequential(*features), nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            first, relu, nn.Dropout(), second, last_relu, nn.Dropout(), last
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.classifier(torch.flatten(self.pool(self.features(x)), 1))
        return result


class Counting(TorchDispatchMode):
    """Counts the calls of ATen operators; one operator may make several."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


#: Whole models, of which nothing but their operators is looked at: on the device `meta`.
WHOLE: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "VGG-19": (VGG19, lambda: {"x": torch.ones(2, 3, 224, 224)}),
    "ResNet-50": (classifiers.resnet50, lambda: {"pixel_values": torch.ones(2, 3, 224, 224)}),
    "BERT-base, attention written out": (
        lambda: classifiers.bert_base("eager"),
        lambda: {"input_ids": torch.ones(2, 16, dtype=torch.long)},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *WHOLE])
def test_more_is_seen_than_by_hooks_on_modules(name: str) -> None:
    with torch.device("meta" if name in WHOLE else "cpu"):
        if name in WHOLE:
            make, feed = WHOLE[name]
            model, arguments = make().train(), feed()
        else:
            make, arguments = MODELS[name]
            model = make()

    def forward() -> torch.Tensor:
        output = model(**arguments)
        result = output if isinstance(output, torch.Tensor) else output[0]
        assert isinstance(result, torch.Tensor)
        return result

    calls = []
    hooks = [
        module.register_forward_hook(lambda *_: calls.append(1))
        for module in model.modules()
        if not list(module.children())
    ]
    with Counting() as aten:
        result = forward()
    for hook in hooks:
        hook.remove()
    gradient = torch.ones_like(result)
    with Counting() as aten_backward:
        result.backward(gradient)

    graph = trace(lambda: forward().backward(gradient))
    executions = sum(op.executions or 0 for op in graph.ops)
    backward = sum(op.executions or 0 for op in graph.backward_ops)
    print(
        f"{name}: {len(calls)} calls of leaf modules, {executions} operators, {backward} backward; "
        f"of ATen's, {aten.calls} and {aten_backward.calls}"
    )
    assert executions > len(calls)
    assert backward > executions
    # Each operator with a gradient has its backward operators, in the same modules.
    assert all(graph.forward_of(op) or "AccumulateGrad" in op.name for op in graph.backward_ops)
    parameters = {op.name for op in graph.backward_ops if op.type == "AccumulateGrad"}
    used = {name for name, value in model.named_parameters() if value.grad is not None}
    assert parameters == {f"{name}:AccumulateGrad" for name in used}
