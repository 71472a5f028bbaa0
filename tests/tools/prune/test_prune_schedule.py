"""Pruning over several weights and by a schedule, against `torch.nn.utils.prune` and by hand."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.nn.utils import prune

import amanda
from amanda_core.errors import AmandaWarning
from amanda_tools.prune import Prune

pytestmark = pytest.mark.one_interceptor

# Untyped in torch's stubs.
by_torch: Any = prune


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 8), nn.Linear(8, 5)
    )


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def weights_of(model: nn.Sequential) -> list[Any]:
    return [layer for layer in model if hasattr(layer, "weight")]


@pytest.mark.parametrize("sparsity", [0.0, 0.37, 0.9, 1.0])
def test_global_pruning_is_that_of_pytorch(sparsity: float) -> None:
    model, reference = network(), network()
    layers = [(layer, "weight") for layer in weights_of(reference)]
    by_torch.global_unstructured(layers, by_torch.L1Unstructured, amount=sparsity)
    tool = Prune(sparsity, scope="global")
    with amanda.apply(tool):
        dense = model(batch())  # Shows which weights there are.
        output = model(batch())
        output.square().sum().backward()
    expected = reference(batch())
    expected.square().sum().backward()
    assert torch.equal(output, expected)
    assert sparsity == 0 or not torch.equal(output, dense)
    for own, (layer, _) in zip(weights_of(model), layers, strict=True):
        assert torch.equal(own.weight.grad, layer.weight_orig.grad)
    elements = sum(layer.weight.numel() for layer in weights_of(model))
    found = tool.result()
    assert sum(one.pruned for one in found.weights) == round(sparsity * elements)
    assert found.achieved == pytest.approx(sparsity, abs=1 / elements)


def test_layers_lose_their_smallest_weights_together() -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(6, 8)
    x = torch.randn(3, 2, 6)
    tool = Prune(0.5, scope="layer")
    with amanda.apply(tool):
        layer(x)
        output, _ = layer(x)
    names = [name for name, _ in layer.named_parameters() if name.startswith("weight")]
    both = torch.cat([getattr(layer, name).detach().abs().flatten() for name in names])
    limit = both.kthvalue(both.numel() // 2).values
    with torch.no_grad():
        for name in names:
            getattr(layer, name).mul_(getattr(layer, name).abs() > limit)
    assert torch.equal(output, layer(x)[0])
    counts = [one.pruned for one in tool.result().weights]
    assert sum(counts) == both.numel() // 2
    assert counts[0] != round(0.5 * 6 * 32)  # Not each by itself.


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    loss = model(batch(seed)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("scope", ["weight", "global"])
def test_a_schedule_raises_the_fraction_by_steps_of_the_optimizer(scope: Any) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tool = Prune(0.8, scope=scope, steps=6, begin=1, initial=0.2, every=2)
    fractions: list[float] = []
    zeros: list[torch.Tensor] = []
    with amanda.apply(tool):
        for seed in range(10):
            step_of(model, optimizer, seed)
            fractions.append(tool.result().achieved)
            gradients = [layer.weight.grad.flatten() for layer in weights_of(model)]
            zeros.append(torch.cat(gradients) == 0)
    # What was pruned stays pruned.
    first = 1 if scope == "global" else 0
    for before, after in itertools.pairwise(zeros[first:]):
        assert (after | ~before)[-40:].all()  # The last layer has no zeros of its own.
    cubic = [0.8 + (0.2 - 0.8) * (1 - t / 6) ** 3 for t in (0, 2, 4, 6)]
    expected = [cubic[0]] * 3 + [cubic[1]] * 2 + [cubic[2]] * 2 + [cubic[3]] * 3
    if scope == "global":
        expected[0] = 0.0  # It shows which weights there are.
    assert fractions == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("scope", ["matrix", "global"])
@pytest.mark.parametrize("every", [1, 3])
def test_a_schedule_resumes_with_the_same_bits(scope: Any, every: int, tmp_path: Path) -> None:
    def tool() -> Prune:
        return Prune(0.9, scope=scope, steps=8, initial=0.3, every=every)

    def trained(model: nn.Module, tool: Prune, seeds: range) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with amanda.apply(tool):
            return [step_of(model, optimizer, seed) for seed in seeds]

    expected = trained(network(), tool(), range(10))
    model, first, second = network(), tool(), tool()
    losses = trained(model, first, range(5))
    path = first.save(tmp_path / "prune.safetensors")
    other = network()
    other.load_state_dict(model.state_dict())
    second.load(path)
    assert losses + trained(other, second, range(5, 10)) == expected


@pytest.mark.parametrize("scope", ["matrix", "weight", "layer", "global"])
def test_taylor_scores_are_squares_of_products_with_gradients(scope: Any) -> None:
    model, reference = network(), network()
    dense = reference(batch()).detach()
    with amanda.apply(tool := Prune(0.5, scope=scope, score="taylor")):
        with torch.no_grad():
            for _ in range(2):  # There are no gradients yet.
                assert torch.equal(model(batch()), dense)
        model(batch()).square().mean().backward()
        output = model(batch())
    reference(batch()).square().mean().backward()
    layers = weights_of(reference)
    scores = [(one.weight * one.weight.grad).detach().square() for one in layers]
    every = torch.cat([score.flatten() for score in scores])
    with torch.no_grad():
        for layer, score in zip(layers, scores, strict=True):
            part = every if scope == "global" else score.flatten()
            limit = part.sort().values[round(0.5 * len(part)) - 1]
            layer.weight.mul_(score > limit)
    assert torch.equal(output, reference(batch()))
    assert tool.result().achieved == pytest.approx(0.5, abs=1e-3)


def test_a_schedule_by_taylor_scores_prunes_more_and_resumes(tmp_path: Path) -> None:
    def tool() -> Prune:
        return Prune(0.9, scope="global", steps=6, initial=0.3, every=2, score="taylor")

    def trained(model: nn.Module, tool: Prune, seeds: range) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with amanda.apply(tool):
            return [step_of(model, optimizer, seed) for seed in seeds]

    whole = tool()
    expected = trained(network(), whole, range(9))
    assert whole.result().achieved == pytest.approx(0.9, abs=1e-3)
    model, other, first, second = network(), network(), tool(), tool()
    losses = trained(model, first, range(4))
    assert 0.3 < first.result().achieved < 0.9
    other.load_state_dict(model.state_dict())
    second.load(first.save(tmp_path / "prune.safetensors"))
    assert losses + trained(other, second, range(4, 9)) == expected


def test_a_weight_without_a_gradient_has_no_taylor_score() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    with amanda.apply(tool := Prune(0.5, scope="global", score="taylor")):
        for _ in range(3):
            model(batch()).square().mean().backward()
    found = {one.name: one.pruned for one in tool.result().weights}
    assert found["0.weight"] == 0
    assert found["3.weight"] > 0
    assert tool.result().notes == ["0.weight had no gradient, so it is not pruned"]


def test_what_is_saved_or_converted_is_not_pruned() -> None:
    model, tool = network(), Prune(0.5)
    with amanda.apply(tool):
        model(batch())
        with pytest.warns(AmandaWarning, match="without the changes of Prune"):
            state = model.state_dict()
        saved = {name: value.clone() for name, value in state.items()}
        copied, average = copy.deepcopy(model), weights_of(model)[1].weight.detach().clone()
        model = model.double().float()
        half = network().bfloat16()
        model(batch())
    assert all(map(torch.equal, saved.values(), model.state_dict().values()))
    assert all(map(torch.equal, copied.parameters(), model.parameters()))
    assert torch.equal(average, weights_of(model)[1].weight)
    assert all(map(torch.equal, half.parameters(), network().bfloat16().parameters()))
    assert [one.name for one in tool.result().weights] == ["0.weight", "3.weight", "4.weight"]
    assert len(tool.bake()) == 3


def test_baking_writes_the_zeros() -> None:
    model, tool = network(), Prune(0.7, scope="global")
    with amanda.apply(tool):
        model(batch())
        pruned = model(batch())
    assert tool.bake() == ["0.weight", "3.weight", "4.weight"]
    assert torch.equal(model(batch()), pruned)
    zeros = sum(int((layer.weight == 0).sum()) for layer in weights_of(model))
    assert zeros == sum(one.pruned for one in tool.result().weights)


@pytest.mark.parametrize(
    "options", [{"sparsity": 1.5}, {"scope": "all"}, {"steps": -1}, {"every": 0}, {"initial": -1}]
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Prune(**{"sparsity": 0.5, **options})


def test_masks_of_compiled_programs_change_in_place() -> None:
    """400 changes of the masks compile nothing again, and nothing runs on the host."""
    changes, graphs, traces = 400, [], []

    def lower(graph: torch.fx.GraphModule, _: Any) -> Any:
        traces.append(graph)
        return make_boxed_func(graph.forward)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_autograd(fw_compiler=lower, bw_compiler=lower)(graph, inputs)

    def train(compiled: bool) -> tuple[list[torch.Tensor], Prune]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 3))
        call = torch.compile(model, backend=backend, fullgraph=True) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tool, losses = Prune(0.9, steps=changes), []
        values = torch.randn(4, 24, generator=torch.Generator().manual_seed(1))
        with amanda.apply(tool):
            for _ in range(changes + 1):
                loss = call(values).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        return losses, tool

    expected, eager = train(compiled=False)
    found, tool = train(compiled=True)
    assert all(map(torch.equal, found, expected))
    assert tool.result().weights == eager.result().weights
    assert [one.pruned for one in tool.result().weights] == [432, 54]  # Nine tenths of them.
    assert len(graphs) == 1
    traced = [str(node.target) for graph in traces for node in graph.graph.nodes]
    assert not any(name.startswith("amanda") for name in traced)  # Operators of routines.
