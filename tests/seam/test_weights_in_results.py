"""Tools name weights by parameter and region, wherever they speak of weights."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward untyped.

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import amanda
from amanda_tools.diff import compare
from amanda_tools.dump import Dump, load_dump
from amanda_tools.effective_path import EffectivePath
from amanda_tools.flops import Flops
from amanda_tools.graph import GraphTracing, Source
from amanda_tools.sparsity import Sparsity

X = torch.ones(3, 2)
KEYS = {"Experts:w[0]", "Experts:w[2]", "Experts:head"}


class Experts(nn.Module):
    """Two of three experts, and a matrix that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(
            torch.tensor([[[0.0, 1], [2, 3]], [[9, 9], [9, 9]], [[0, 0], [0, 4]]])
        )
        self.head = nn.Parameter(torch.eye(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for expert in (2, 0):
            x = functional.linear(x, self.w[expert])
        return (x @ self.head) @ self.head


def test_flops_name_the_expert_of_each_product() -> None:
    tool = Flops()
    with amanda.apply(tool):
        Experts()(X)
    found = [(op.word, op.weights) for op in tool.result().ops]
    assert found == [
        ("linear", ["Experts:w[2]"]),
        ("linear", ["Experts:w[0]"]),
        ("matmul", ["Experts:head"]),
        ("matmul", ["Experts:head"]),
    ]


def test_sparsity_counts_each_weight_once_however_often_it_is_read() -> None:
    tool, model = Sparsity(), Experts()
    with amanda.apply(tool):
        for _ in range(2):
            model(X)
    found = tool.result()
    assert {one.weight: one.zeros // one.executions for one in found.of("weight")} == {
        "Experts:w[2]": 3,
        "Experts:w[0]": 1,
        "Experts:head": 2,
    }
    # 6 of 12: the second product with the last matrix is not counted again.
    assert found.table().title.startswith("zeros: 50.0% of the weights")
    assert {row[1] for row in found.table("weight").rows} == KEYS


def test_dump_and_diff_name_the_weight_of_each_tensor(tmp_path: Path) -> None:
    model = Experts()
    for name in ("a", "b"):
        tool = Dump(values=["inputs", "weights", "gradients"], folder=tmp_path / name)
        with amanda.apply(tool):
            model(X).sum().backward()
        tool.result()
        with torch.no_grad():
            model.w[0, 0, 0] = 7
    tensors = load_dump(tmp_path / "a").index.tensors
    assert {one.weight for one in tensors if one.what == "weight"} == KEYS
    # A view of a parameter is named as well.
    assert {one.weight for one in tensors if one.what == "input"} == {None, "Experts:w"}
    gradients = [one.weight for one in tensors if one.what == "grad_input" and one.position == "1"]
    assert set(gradients) == KEYS
    found = [one for one in compare(tmp_path / "a", tmp_path / "b").compared if not one.same]
    assert (found[0].what, found[0].weight) == ("input", "Experts:w")
    assert "input 0 (Experts:w) of op" in str(found[0])
    assert {one.weight for one in found if one.what == "weight"} == {"Experts:w[0]"}


def test_a_graph_names_parameters_as_the_model_does() -> None:
    tool = GraphTracing()
    with amanda.apply(tool):
        Experts()(X)
    (graph,) = tool.graphs.values()
    sources = [node for node in graph.nodes if isinstance(node, Source)]
    assert sorted(node.name for node in sources if node.kind == "parameter") == ["head", "w"]


def test_a_graph_names_other_parameters_after_their_first_reader() -> None:
    tool, weight = GraphTracing(), nn.Parameter(torch.eye(2))
    with amanda.apply(tool):
        functional.linear(X, weight)
    (graph,) = tool.graphs.values()
    assert "linear.weight" in {node.name for node in graph.nodes if isinstance(node, Source)}


def test_effective_paths_name_the_weight_of_each_layer() -> None:
    tool = EffectivePath(edges=True)
    with amanda.apply(tool):
        Experts()(X + torch.rand(3, 2))
    weights = {layer.weight for layer in tool.result().layers if layer.weights is not None}
    assert weights == KEYS
