"""N:M pruning against `torch.ao.pruning`, a transcription of SR-STE, and by hand."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_core.errors import ResultError
from amanda_tools.prune import PruneNM, PruneTiles

pytestmark = pytest.mark.one_interceptor


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 8), nn.Linear(8, 4)
    )


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pytorch_compresses_what_was_baked(dtype: torch.dtype) -> None:
    """By the functions with which `torch.sparse.to_sparse_semi_structured` does so."""
    conversions: Any = pytest.importorskip("torch.sparse._semi_structured_conversions")

    def compressed(weight: torch.Tensor) -> torch.Tensor:
        kept, numbers = conversions.sparse_semi_structured_from_dense_cutlass(weight)
        assert kept.shape == (64, 64)
        found: torch.Tensor = conversions.sparse_semi_structured_to_dense_cutlass(kept, numbers)
        return found

    linear, tool = nn.Linear(128, 64).to(dtype), PruneNM(2, 4)
    weight = linear.weight.detach()
    with amanda.apply(tool):
        linear(torch.ones(2, 128, dtype=dtype))
    assert not torch.equal(compressed(weight), weight)
    tool.bake(linear)
    assert torch.equal(compressed(weight), weight)


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="torch.sparse.to_sparse_semi_structured takes CUDA tensors only",
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
def test_baked_weights_become_semi_structured() -> None:
    linear, tool = nn.Linear(128, 128).half().cuda(), PruneNM(2, 4)
    x = torch.ones(64, 128).half().cuda()
    with amanda.apply(tool), torch.no_grad():
        expected = linear(x)
    tool.bake(linear)
    weight: Any = torch.sparse.to_sparse_semi_structured(linear.weight.detach())
    assert torch.equal(weight.to_dense(), linear.weight)
    linear.weight = nn.Parameter(weight)
    with torch.no_grad():
        torch.testing.assert_close(linear(x), expected, rtol=1e-2, atol=1e-2)


def test_masks_of_linear_layers_are_those_of_torch_ao() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.pruning import WeightNormSparsifier  # type: ignore[attr-defined]
    model = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 16))
    reference = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 16))
    reference.load_state_dict(model.state_dict())
    sparsifier: Any = WeightNormSparsifier(
        sparsity_level=1.0, sparse_block_shape=(1, 4), zeros_per_block=2
    )
    sparsifier.prepare(reference, [{"tensor_fqn": f"{n}.weight"} for n in (0, 1)])
    sparsifier.step()
    tool = PruneNM(2, 4)
    x = torch.randn(3, 32)
    with amanda.apply(tool):
        output = model(x)
        output.square().sum().backward()
    expected = reference(x)
    assert torch.equal(output, expected)
    expected.square().sum().backward()
    for own, other in zip(model, reference, strict=True):
        there: Any = other
        mask = there.parametrizations.weight[0].mask
        gradient = there.parametrizations.weight.original.grad
        assert torch.equal(own.weight.grad, gradient)  # type: ignore[arg-type]
        assert int((mask == 0).sum()) == mask.numel() // 2
    assert [one.pruned for one in tool.result().weights] == [384, 192]
    assert tool.result().achieved == 0.5
    assert tool.result().effective_macs == tool.result().macs // 2 == 3 * (32 * 24 + 24 * 16) // 2


class Sparse(torch.autograd.Function):
    """SR-STE as its paper states it, for one group per row."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        moved = weight.movedim(1, -1)
        groups = moved.detach().abs().reshape(-1, 4)
        index = torch.argsort(groups, dim=1, stable=True)[:, :2]
        mask = torch.ones_like(groups).scatter_(1, index, 0).reshape(moved.shape).movedim(-1, 1)
        ctx.save_for_backward(weight, mask)
        return weight * mask

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        weight, mask = ctx.saved_tensors
        result: torch.Tensor = gradients[0] + 2e-4 * (1 - mask) * weight
        return result


class SparseNetwork(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sparse: Any = Sparse.apply
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                x = nn.functional.conv2d(x, sparse(layer.weight), layer.bias)
            elif isinstance(layer, nn.Linear):
                x = nn.functional.linear(x, sparse(layer.weight), layer.bias)
            else:
                x = layer(x)
        return x


def train(model: nn.Module, steps: int, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(steps):
        loss = model(batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def test_sr_ste_trains_as_its_reference_bit_for_bit() -> None:
    model, layers = network(), network()
    reference = SparseNetwork(layers)
    expected = train(reference, 6, momentum(reference))
    with amanda.apply(tool := PruneNM(2, 4, method="sr_ste")):
        assert train(model, 6, momentum(model)) == expected
    for own, other in zip(model.parameters(), layers.parameters(), strict=True):
        assert torch.equal(own, other)
    names = tool.bake()
    assert names == ["0.weight", "0.bias", "3.weight", "3.bias", "4.weight", "4.bias"][::2]
    assert torch.equal(model(batch()), reference(batch()))


def test_apex_trains_as_masked_weights_and_gradients() -> None:
    """Its rule: ``grad *= mask`` before the step and ``w *= mask`` after it, in every step."""
    model, reference = network(), network()
    tool = PruneNM(2, 4, sizes="apex")
    with amanda.apply(tool):
        losses = train(model, 6, momentum(model))
    pruned: Any = reference[3]  # 576 -> 8; 4 -> 16 and 8 -> 4 are not multiples of 8 and 16.
    groups = pruned.weight.detach().abs().reshape(-1, 4)
    mask = torch.zeros_like(groups).scatter_(1, groups.topk(2, dim=1).indices, 1)
    mask = mask.reshape(pruned.weight.shape)
    optimizer, expected = momentum(reference), []
    pruned.weight.data.mul_(mask)
    for step in range(6):
        loss = reference(batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        pruned.weight.grad.mul_(mask)
        optimizer.step()
        pruned.weight.data.mul_(mask)
        expected.append(float(loss.detach()))
    assert losses == expected
    assert [one.name for one in tool.result().weights] == ["3.weight"]
    reasons = {one.name: one.reason for one in tool.result().unreached}
    assert reasons == {
        "0.weight": "16 x 4 channels are not multiples of 8 and 16",
        "4.weight": "4 x 8 channels are not multiples of 8 and 16",
    }
    tool.bake()
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(own, other)


def test_with_taylor_scores_each_group_keeps_the_largest_products() -> None:
    model, reference = network(), network()
    with amanda.apply(PruneNM(2, 4, score="taylor")):
        model(batch()).square().mean().backward()
        output = model(batch())
    reference(batch()).square().mean().backward()
    with torch.no_grad():
        for layer in (reference[0], reference[3], reference[4]):
            one: Any = layer
            scores = (one.weight * one.weight.grad).square().movedim(1, -1)
            groups = scores.reshape(-1, 4)
            mask = torch.zeros_like(groups).scatter_(1, groups.topk(2, dim=1).indices, 1)
            one.weight.mul_(mask.reshape(scores.shape).movedim(-1, 1))
    assert torch.equal(output, reference(batch()))


def test_it_resumes_with_the_same_bits_and_refuses_another_model(tmp_path: Path) -> None:
    whole = network()
    with amanda.apply(PruneNM(1, 4)):
        expected = train(whole, 6, torch.optim.SGD(whole.parameters(), lr=0.1))
    model = network()
    with amanda.apply(tool := PruneNM(1, 4)):
        first = train(model, 3, torch.optim.SGD(model.parameters(), lr=0.1))
    tool.save(tmp_path / "tool.safetensors")
    resumed, other = PruneNM(1, 4), network(5)
    resumed.load(tmp_path / "tool.safetensors")
    other.load_state_dict(model.state_dict())
    with amanda.apply(resumed):
        optimizer, second = torch.optim.SGD(other.parameters(), lr=0.1), []
        for step in range(3, 6):
            loss = other(batch(step)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            second.append(float(loss.detach()))
    assert first + second == expected
    assert resumed.result().achieved == 0.75

    wrong = PruneNM(1, 4)
    wrong.load(tmp_path / "tool.safetensors")
    narrower = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten())
    with amanda.apply(wrong), pytest.raises(ResultError, match=r"0\.weight has shape \[8, 4"):
        narrower(batch())
    with pytest.raises(ResultError, match=r"options \{'n': 1"):
        PruneNM(2, 4).load(tmp_path / "tool.safetensors")
    state = tool.state_dict()
    state["mask/7.weight"] = state.pop("mask/4.weight")
    with pytest.raises(ResultError, match=r"mask/7\.weight in the state: no such parameter"):
        PruneNM(1, 4).load_state_dict(state)
    state = tool.state_dict()
    state["mask/4.weight"] = state["mask/4.weight"].T
    with pytest.raises(ResultError, match=r"its shape is \(8, 4\), and that of the parameter"):
        PruneNM(1, 4).load_state_dict(state)


def test_after_remove_the_model_is_dense() -> None:
    model, x = network(), batch()
    before = [parameter.clone() for parameter in model.parameters()]
    dense, tool = model(x), PruneNM(1, 4)
    with amanda.apply(tool):
        assert not torch.equal(model(x), dense)
        tool.remove()
        assert torch.equal(model(x), dense)
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("options", [(0, 4), (5, 4)])
def test_impossible_patterns_are_refused(options: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="n must be from 1 to m"):
        PruneNM(*options)


@pytest.mark.parametrize("method", ["fixed", "sr_ste"])
def test_a_single_row_has_groups_as_well(method: Any) -> None:
    weight = nn.Parameter(torch.tensor([[1.0, -4.0, 3.0, -2.0]]))
    with amanda.apply(PruneNM(2, 4, method=method)):
        output = nn.functional.linear(torch.ones(1, 4), weight)
    assert output.tolist() == [[-1.0]]


@pytest.mark.parametrize("make", [lambda: PruneNM(4, 4), lambda: PruneTiles(0.5)])
def test_a_parameter_of_no_module_that_cannot_be_read_is_listed(make: Any) -> None:
    weight, x = nn.Parameter(torch.ones(4, 4, device="meta")), torch.ones(2, 4, device="meta")
    tool = make()
    with amanda.apply(tool):
        (x @ weight).sum().backward()  # type: ignore[no-untyped-call]
    (unreached,) = tool.result().unreached
    assert (unreached.elements, unreached.reason) == (16, "a tensor without values")
