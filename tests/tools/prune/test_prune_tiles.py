"""Tile-wise pruning against loops over columns, tiles and rows."""

from __future__ import annotations

import gc
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amanda
from amanda_tools.prune import PruneTiles, tile_masks

pytestmark = pytest.mark.one_interceptor


def by_loops(matrices: list[Any], sparsity: float, tile: int, restored: float) -> list[Any]:
    """Prune columns by their norms over all matrices, then rows of tiles by theirs."""
    share = 100 - math.sqrt(10000 - 100 * (sparsity + restored))

    def norm(values: Any, size: int) -> float:
        return math.sqrt(sum(float(value) ** 2 for value in values)) / size

    columns = [
        (norm(m[:, c], len(m)), n, c) for n, m in enumerate(matrices) for c in range(m.shape[1])
    ]
    limit = np.percentile([one[0] for one in columns], share)
    kept = {(n, c) for value, n, c in columns if value > limit}
    rows = []
    for n, m in enumerate(matrices):
        tiles: list[list[int]] = [[]]
        full = 0
        for c in range(m.shape[1]):
            tiles[-1].append(c)
            full += (n, c) in kept
            if full == tile and c + 1 < m.shape[1]:
                tiles.append([])
                full = 0
        for columns_of_tile in tiles:
            for r in range(len(m)):
                there = [m[r, c] for c in columns_of_tile if (n, c) in kept]
                rows.append((norm(there, len(columns_of_tile)), n, r, columns_of_tile))
    limit = np.percentile([one[0] for one in rows], share)
    masks = [np.zeros(m.shape, bool) for m in matrices]
    for value, n, r, columns_of_tile in rows:
        for c in columns_of_tile:
            masks[n][r, c] = value > limit and (n, c) in kept
    elements = [
        (-1.0 if masks[n][r, c] else m[r, c], n, r, c)
        for n, m in enumerate(matrices)
        for r in range(len(m))
        for c in range(m.shape[1])
    ]
    if restored:
        limit = np.percentile([one[0] for one in elements], 100 - restored)
        for value, n, r, c in elements:
            masks[n][r, c] |= value > limit
    return masks


@pytest.mark.parametrize("restored", [0.0, 5.0])
@pytest.mark.parametrize("sparsity", [50, 75])
def test_masks_are_those_of_loops(sparsity: int, restored: float) -> None:
    random = np.random.default_rng(0)
    shapes = [(27, 20), (40, 33), (33, 10)]
    matrices = [np.abs(random.normal(0, 1 + n, shape)) for n, shape in enumerate(shapes)]
    found = tile_masks(matrices, sparsity, 8, restored)
    expected = by_loops(matrices, sparsity, 8, restored)
    assert all(map(np.array_equal, found, expected))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 20, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20 * 36, 30), nn.Linear(30, 10)
    )


@pytest.mark.parametrize(("restored", "dimensions"), [(0.0, "both"), (0.02, "both"), (0, "rows")])
def test_a_model_is_pruned_as_its_matrices(restored: float, dimensions: Any) -> None:
    model, reference = network(), network()
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    tool = PruneTiles(0.6, tile=16, restored=restored, dimensions=dimensions)
    with amanda.apply(tool):
        model(x)
        output = model(x)
        output.square().sum().backward()
    layers = [layer for layer in reference if hasattr(layer, "weight")]
    matrices = []
    for layer in layers:
        weight: Any = layer.weight
        kernel = weight.ndim == 4
        turned = weight.permute(2, 3, 1, 0) if kernel else weight.T  # HWIO
        matrices.append(turned.detach().abs().reshape(-1, len(weight)).numpy())
    if dimensions == "both":
        masks = by_loops(matrices, 60, 16, 100 * restored)
    else:
        masks = tile_masks(matrices, 60, 16, columns=False)
        ragged = [np.add.reduceat(m, range(0, m.shape[1], 16), axis=1) for m in masks]
        widths = [np.diff([*range(0, m.shape[1], 16), m.shape[1]]) for m in masks]
        for sums, width in zip(ragged, widths, strict=True):
            assert ((sums == 0) | (sums == width)).all()  # Rows of a tile as a whole.
    found = []
    for layer, mask in zip(layers, masks, strict=True):
        weight = layer.weight
        tensor = torch.from_numpy(mask)
        if weight.ndim == 4:
            tensor = tensor.reshape(3, 3, 3, -1).permute(3, 2, 0, 1)
        else:
            tensor = tensor.T
        found.append(tensor)
        with torch.no_grad():
            weight.mul_(tensor)
    expected = reference(x)
    expected.square().sum().backward()
    assert torch.equal(output, expected)
    for own, layer, tensor in zip(
        [one for one in model if hasattr(one, "weight")], layers, found, strict=True
    ):
        there: Any = layer
        mine: Any = own
        assert torch.equal(mine.weight.grad, there.weight.grad * tensor)
    zeros = sum(int((~mask).sum()) for mask in masks)
    assert sum(one.pruned for one in tool.result().weights) == zeros
    assert tool.result().achieved == zeros / sum(mask.size for mask in masks)


def test_with_taylor_scores_norms_are_those_of_products_with_gradients() -> None:
    model, reference = network(), network()
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with amanda.apply(tool := PruneTiles(0.6, tile=16, score="taylor")):
        model(x).square().sum().backward()
        output = model(x)
    reference(x).square().sum().backward()
    layers: list[Any] = [layer for layer in reference if hasattr(layer, "weight")]
    matrices = []
    for layer in layers:
        score = (layer.weight * layer.weight.grad).detach().square()
        matrices.append(score.reshape(len(score), -1).T.numpy())
    masks = by_loops(matrices, 60, 16, 0.0)
    with torch.no_grad():
        for layer, mask in zip(layers, masks, strict=True):
            layer.weight.mul_(torch.from_numpy(mask).T.reshape(layer.weight.shape))
    assert torch.equal(output, reference(x))
    assert not torch.equal(output, network()(x))
    assert tool.result().achieved == 1 - sum(m.sum() for m in masks) / sum(m.size for m in masks)


def test_stages_prune_more_and_more() -> None:
    model, tool = network(), PruneTiles(0.75, 16, stages=[0.25, 0.5], stage_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    with amanda.apply(tool):
        for seed in range(7):
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            found.append(tool.result().achieved)
    assert found[0] == 0
    assert found[1:] == sorted(found[1:])
    # Steps 2 and 4 end a stage.
    assert found[1] < found[2] == found[3] < found[4] == found[5] == found[6]


@pytest.mark.parametrize("reentrant", [True, False])
def test_masks_stay_while_parts_of_an_execution_are_recomputed(reentrant: bool) -> None:
    """Each part of the model is an outermost module of its own."""
    torch.manual_seed(0)
    first, second = nn.Linear(6, 8), nn.Linear(8, 3)
    x = torch.ones(2, 6, requires_grad=True)
    tool = PruneTiles(0.5, tile=4)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.0)
    gradients = []
    with amanda.apply(tool):
        for _ in range(2):
            hidden = checkpoint(first, x, use_reentrant=reentrant)
            checkpoint(second, hidden, use_reentrant=reentrant).sum().backward()
            assert x.grad is not None
            gradients.append(x.grad)
            x.grad = None
            optimizer.step()
    torch.testing.assert_close(gradients[0], (second.weight @ first.weight).sum(0).expand(2, 6))
    assert (gradients[1] != gradients[0]).any()
    # Columns and rows were compared over both.
    matrices = [layer.weight.detach().abs().T.numpy() for layer in (first, second)]
    masks = by_loops(matrices, 50, 4, 0)
    assert sum(one.pruned for one in tool.result().weights) == sum(int((~m).sum()) for m in masks)


@pytest.mark.parametrize(
    "options", [{"tile": 0}, {"stages": [0.5]}, {"restored": 0.7}, {"dimensions": "columns"}]
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"stage|restored|dimensions"):
        PruneTiles(0.75, **options)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_masks_that_are_made_as_a_checkpointed_module_is_called(use_reentrant: bool) -> None:
    def gradients(checkpointed: bool) -> list[Any]:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8) for _ in range(2)]
        # Gradients are accumulated, so no step of an optimizer comes before the second call.
        with amanda.apply(PruneTiles(0.5, tile=2)):
            for _ in range(3):
                x = torch.linspace(-1, 1, 16).reshape(2, 8).requires_grad_()
                for layer in layers:
                    x = (
                        checkpoint(layer, x, use_reentrant=use_reentrant)
                        if checkpointed
                        else layer(x)
                    ).relu()
                torch.autograd.backward(x.sum())
        return [tensor.grad for layer in layers for tensor in layer.parameters()]

    for one, other in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("score", ["magnitude", "taylor"])
def test_parameters_that_have_died(score: Any) -> None:
    """Another one, perhaps of the same name, is pruned as if there had never been these."""

    def pruned(tool: PruneTiles, width: int) -> torch.Tensor:
        torch.manual_seed(width)
        model, x = nn.Linear(width, 16), torch.rand(4, width)
        with amanda.apply(tool):
            for _ in range(2):
                model(x).square().sum().backward()
            result: torch.Tensor = model(x)
        return result.detach()

    tool = PruneTiles(0.5, score=score)
    for width in (8, 16, 24, 32):
        assert torch.equal(pruned(tool, width), pruned(PruneTiles(0.5, score=score), width))
        gc.collect()
    assert {tuple(one.shape) for one in tool.result().weights} == {(16, 24), (16, 32)}


def test_weights_that_the_program_makes_at_each_call_are_not_pruned_and_that_is_said() -> None:
    made, x = torch.randn(8, 6), torch.randn(5, 6)
    tool = PruneTiles(0.5, tile=2)
    with amanda.apply(tool):
        for _ in range(2):
            weight = torch.tensor(made.tolist(), requires_grad=True)
            found = nn.functional.linear(x, weight).detach()
            del weight
            amanda.step()
    assert torch.equal(found, x @ made.T)
    (note,) = tool.result().notes
    assert note.startswith("not supported on pytorch/")
    assert note.endswith("since the program makes them at each call")


def test_weights_that_die_before_their_mask_are_not_reached() -> None:
    tool = PruneTiles(sparsity=0.5)
    with amanda.apply(tool):
        for _ in range(3):
            nn.Linear(64, 64, bias=False)(torch.ones(2, 64))
    result = tool.result()
    assert [row.pruned for row in result.weights] == [0] * len(result.weights)
    assert result.parameters
    assert not result.reached
    assert "gone when its mask" in result.unreached[0].reason
