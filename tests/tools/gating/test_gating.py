"""Dynamic pruning against transcriptions of the published algorithms, written in loops."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amanda
from amanda_core.errors import ResultError, ToolError
from amanda_tools.gating import PruneAttention, PruneChannels, PrunePositions

pytestmark = pytest.mark.one_interceptor


def images(count: int = 4, channels: int = 3, size: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(seed))


# Channels.


def convolutions(norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 7, 3, bias=not norm)]
    layers += [nn.BatchNorm2d(7)] if norm else []
    layers += [nn.ReLU(inplace=True), nn.Conv2d(7, 6, 3, stride=2), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(54, 5))
    if norm:
        with torch.no_grad():
            for name, value in model[1].named_parameters():
                value.copy_(torch.linspace(0.1, 0.7, 7) - (0.4 if name == "bias" else 0))
    return model


def boosted(x: Any, layer: Any, norm: Any, gate: Any, density: float, pooling: str) -> Any:
    """Return the output of a gated convolution before its activation, and what is active."""
    weight, bias = (value.detach().numpy() for value in (gate.weight, gate.bias))
    y = layer(x).detach()
    if norm is not None:
        mean, variance = y.mean((0, 2, 3)), y.var((0, 2, 3), unbiased=False)
        y = (y - mean[:, None, None]) / (variance[:, None, None] + norm.eps).sqrt()
        beta = norm.bias.detach().numpy()
    else:
        beta = layer.bias.detach().numpy()
        y = y - layer.bias.detach()[:, None, None]
    out, flags = y.numpy().copy(), np.zeros(y.shape[:2], bool)
    for n, image in enumerate(x.detach().numpy()):
        means = []
        for plane in image:
            changed = {"mean": plane, "l1": np.abs(plane), "l2": plane**2}[pooling]
            means.append(changed.sum() / plane.size)
        saliency = [
            max(0.0, sum(w * m for w, m in zip(row, means, strict=True)) + b)
            for row, b in zip(weight, bias, strict=True)
        ]
        count = math.ceil(density * len(saliency))
        limit = sorted(saliency, reverse=True)[count] if count < len(saliency) else -1.0
        for c, value in enumerate(saliency):
            flags[n, c] = value > limit
            out[n, c] = flags[n, c] * (value * out[n, c] + beta[c])
    return torch.from_numpy(out), flags


@pytest.mark.parametrize("pooling", ["mean", "l1", "l2"])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("density", [0.3, 1.0])
def test_channels_are_those_of_loops(density: float, norm: bool, pooling: Any) -> None:
    model, x = convolutions(norm), images()
    tool = PruneChannels(density, pooling)
    with amanda.apply(tool):
        found = model(x)
    gates = list(tool.gates.values())
    first, active = boosted(x, model[0], model[1] if norm else None, gates[0], density, pooling)
    second, later = boosted(F.relu(first), model[2 + norm], None, gates[1], density, pooling)
    expected = model[-1](F.relu(second).flatten(1))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    result = tool.result()
    assert [round(op.kept) for op in result.ops] == [active.sum(), later.sum()]
    for op, flags in zip(result.ops, (active, later), strict=True):
        assert op.share == pytest.approx(density, abs=1 / flags.shape[1])
        assert op.total == flags.size
    # Channels that are not computed cost nothing.
    assert [op.macs for op in result.ops] == [4 * 7 * 49 * 27, 4 * 6 * 9 * 63]
    assert result.effective_macs == round(sum(op.macs * op.share for op in result.ops))


def test_gradients_of_gates_are_those_of_the_formula() -> None:
    model, twin, x = convolutions(), convolutions(), images()
    tool = PruneChannels(0.5, layers=["0"])
    with amanda.apply(tool):
        loss = model(x).square().sum()
        (loss + 0.1 * tool.loss()).backward()
    (gate,) = tool.gates.values()
    phi, rho = (value.detach().clone().requires_grad_() for value in gate.parameters())
    saliency = (x.mean((2, 3)) @ phi.T + rho).relu()
    rank = saliency.detach().argsort(1, descending=True).argsort(1)
    active = (rank < 4).float()
    y = F.batch_norm(twin[0](x), None, None, training=True)
    y = (active * saliency)[..., None, None] * y + (active * twin[1].bias)[..., None, None]
    out = twin[3:](y.relu())
    (out.square().sum() + 0.1 * (saliency * active).sum()).backward()
    parameters = [*gate.parameters(), model[0].weight, model[1].bias, model[-1].weight]
    expected = [phi, rho, twin[0].weight, twin[1].bias, twin[-1].weight]
    for own, other in zip(parameters, expected, strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    assert model[1].weight.grad is None  # In its place the gate scales.


# Positions.


class Basic(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outer) for _ in range(2))
        self.down = nn.Conv2d(inner, outer, 1, stride) if stride > 1 else None

    def forward(self, x: torch.Tensor) -> Any:
        identity = x if self.down is None else self.down(x)
        return F.relu(identity + self.branch(x))

    def branch(self, x: torch.Tensor) -> Any:
        return self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))


class Bottleneck(nn.Module):
    """A residual block of three convolutions, the second of which has the stride."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(inner, 4, 1, bias=False),
                nn.Conv2d(4, 4, 3, stride, 1, bias=False),
                nn.Conv2d(4, outer, 1, bias=False),
            ]
        )
        self.down = nn.Conv2d(inner, outer, 1, stride)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.branch(x)
        out += self.down(x)
        return F.relu_(out)

    def branch(self, x: torch.Tensor) -> Any:
        return self.convs[2](F.relu(self.convs[1](F.relu(self.convs[0](x)))))


def residual(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Basic(8, 8, 1), Bottleneck(8, 12, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5)),
    )


def chosen(x: Any, gate: Any, stride: int) -> Any:
    """Return which positions a gate chooses in evaluation."""
    conv, linear = gate["conv"], gate["linear"]
    whole = (x.mean((2, 3)) @ linear.weight.T + linear.bias)[:, :, None, None]
    return (F.conv2d(x, conv.weight, conv.bias, stride, 1) + whole >= 0).float()


def around(positions: Any, stride: int) -> Any:
    """Return the positions that a 3 x 3 convolution reads, one by one."""
    n, _, height, width = positions.shape
    found = torch.zeros(n, 1, height * stride, width * stride)
    for i, _, y, x in positions.nonzero().tolist():
        top, left = y * stride, x * stride
        found[i, 0, max(top - 1, 0) : top + 2, max(left - 1, 0) : left + 2] = 1
    return found


def test_positions_are_those_of_the_algorithm() -> None:
    model, x = residual().eval(), images(6, size=10)
    tool = PrunePositions(0.4, steps=100)
    with torch.no_grad(), amanda.apply(tool):
        dense = model(x)
        found = model(x)
        tool.step = 20
        loss = tool.loss()
    with torch.no_grad():
        assert torch.equal(dense, model(x))
        stem = model[1](model[0](x))
        basic: Any = model[2]
        bottleneck: Any = model[3]
        gates = list(tool.gates.values())
        one = chosen(stem, gates[0], 1)
        middle = F.relu(stem + one * basic.branch(stem))
        two = chosen(middle, gates[1], 2)
        out = F.relu(bottleneck.down(middle) + two * bottleneck.branch(middle))
        assert torch.equal(found, model[4:](out))
    shares, costs = [], []
    for parts in (
        [(around(one, 1), 8 * 8 * 9), (one, 8 * 8 * 9)],
        [(around(two, 2), 8 * 4), (two, 4 * 4 * 9), (two, 4 * 12)],
    ):
        used = sum(float(mask.sum()) * cost for mask, cost in parts)
        total = sum(mask.numel() * cost for mask, cost in parts)
        shares.append(used / total)
        costs.append((used, total))
    progress = math.cos(20 / 33 * math.pi / 2) ** 2
    upper, lower = 1 - progress * 0.6, progress * 0.4
    blocks = [max(0, p - upper) ** 2 + max(0, lower - p) ** 2 for p in shares]
    network = sum(used for used, _ in costs) / sum(total for _, total in costs)
    assert float(loss) == pytest.approx((network - 0.4) ** 2 + sum(blocks) / 2, abs=1e-6)
    assert tool.result().effective_macs == pytest.approx(sum(used for used, _ in costs), abs=1)
    assert tool.result().macs == sum(total for _, total in costs)


def test_training_decides_with_noise_and_the_gradient_of_the_sigmoid() -> None:
    model, twin, x = residual().eval(), residual().eval(), images(3, size=10)
    tool = PrunePositions(0.4, layers=["2"])
    with amanda.apply(tool):
        model(x)
        torch.manual_seed(5)
        model(x).square().sum().backward()
    (gate,) = tool.gates.values()
    copy = nn.ModuleDict({"conv": nn.Conv2d(8, 1, 3, padding=1), "linear": nn.Linear(8, 1)})
    copy.load_state_dict(gate.state_dict())
    torch.manual_seed(5)
    stem = twin[1](twin[0](x))
    soft = copy["conv"](stem) + copy["linear"](stem.mean((2, 3)))[..., None, None]
    drawn = torch.rand(2, *soft.shape)
    noise = -torch.log(-torch.log(drawn + 1e-8) + 1e-8)
    soft = torch.sigmoid(soft + noise[0] - noise[1])
    hard = ((soft >= 0.5).float() - soft).detach() + soft
    block: Any = twin[2]
    twin[3:](F.relu(stem + hard * block.branch(stem))).square().sum().backward()
    for own, other in zip(gate.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*learned tensors")  # The tool gives them to the optimizer.
def test_training_reaches_the_budget() -> None:
    model, tool = residual(), PrunePositions(0.5, steps=240)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    x = images(256, size=10)
    labels = (x.mean((1, 2, 3)) * 40).round().long().clamp(-2, 2) + 2
    with amanda.apply(tool):
        for step in range(240):
            part = slice(32 * (step % 8), 32 * (step % 8) + 32)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[part]), labels[part])
            (loss + 10 * tool.loss()).backward()
            optimizer.step()
        for row in tool.rows.values():
            row.kept, row.total = 0, 0
        with torch.no_grad():
            model.eval()(x)
    result = tool.result()
    assert result.effective_macs / result.macs == pytest.approx(0.5, abs=0.02)


# Attention.


class Layer(nn.Module):
    """A layer of an encoder with its normalizations after the sums."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.feed = nn.Sequential(nn.Linear(size, 32), nn.GELU(), nn.Linear(32, size))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.out(attended))
        return self.norms[1](x + self.feed(x))

    def attention(self, x: torch.Tensor, mask: torch.Tensor | None) -> Any:
        q, k, _ = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        return scores.softmax(-1)


class Encoder(nn.Module):
    """Some layers, and the tokens' predictions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer(16, 2) for _ in range(3))
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


SIZE = 8


def tokens(samples: int = 3, blocks: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(7)
    x = 3 * torch.randn(samples, blocks * SIZE, 16, generator=random)
    mask = torch.ones(samples, 1, 1, blocks * SIZE, dtype=torch.bool)
    mask[1, ..., 5 * SIZE + 3 :] = False
    return x, mask


def predicted(attention: Any, gate: Any) -> Any:
    """Return the logits of a gate, block by block."""
    (one, norm, _, _, two, other, _, _, _, last) = gate
    rows = []
    for sample in attention:
        row = []
        for n in range(sample.shape[-1] // SIZE):
            at = slice(n * SIZE, (n + 1) * SIZE)
            tile = sample[None, :, at, at]
            for conv, normalize in ((one, norm), (two, other)):
                tile = F.conv2d(tile, conv.weight, conv.bias, padding=1)
                scale = normalize.weight / (normalize.running_var + normalize.eps).sqrt()
                shift = normalize.bias - normalize.running_mean * scale
                tile = F.relu(tile * scale[:, None, None] + shift[:, None, None])
                tile = F.avg_pool2d(tile, 2)
            row.append(tile.flatten() @ last.weight.T + last.bias)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def skimmed(model: Any, x: Any, mask: Any, gates: list[Any], limits: float, own: bool) -> Any:
    """Return the predictions, and which blocks each layer leaves, by lists of indices.

    With `own` each sample runs by itself, which is what it must not differ from.
    """
    if own and len(x) > 1:
        each = [
            skimmed(model, x[n : n + 1], mask[n : n + 1], gates, limits, True)
            for n in range(len(x))
        ]
        return torch.cat([one[0] for one in each]), [one[1][0] for one in each]
    left = [list(range(x.shape[1] // SIZE)) for _ in x]
    full, history = x.clone(), [[] for _ in x]  # type: Any, list[list[list[int]]]
    for n, layer in enumerate(model.layers):
        places = torch.tensor([[b * SIZE + i for b in row for i in range(SIZE)] for row in left])
        state = torch.stack([full[s, row] for s, row in enumerate(places)])
        there = torch.stack([mask[s, ..., row] for s, row in enumerate(places)])
        logits = predicted(layer.attention(state, there), gates[n])
        state = layer(state, there)
        for s, row in enumerate(places):
            full[s, row] = state[s]
        sure = logits.softmax(-1)[..., 1]
        width = max(1, max(int((row >= limits).sum()) for row in sure))
        for s, row in enumerate(sure):
            best = sorted(sorted(range(len(row)), key=lambda i: -float(row[i]))[:width])
            left[s] = [left[s][i] for i in best]
            history[s].append(left[s])
    return model.head(full), history


@pytest.mark.parametrize("per_sample", [False, True])
def test_blocks_are_skipped_as_by_loops(per_sample: bool) -> None:
    model, (x, mask) = Encoder().eval(), tokens()
    tool = PruneAttention(0.5, SIZE, per_sample=per_sample)
    with torch.no_grad(), amanda.apply(tool):
        dense = model(x, mask)
        model(x, mask)
        gates = list(tool.gates.values())
        assert torch.equal(dense, Encoder().eval()(x, mask))
        # Of each layer some blocks are needed, and others in another layer.
        state, layers = x, model.layers  # type: Any, Any
        for layer, gate in zip(layers, gates, strict=True):
            gate[-1].weight *= 100
            logits = predicted(layer.attention(state, mask), gate)
            gate[-1].bias[1] -= (logits[..., 1] - logits[..., 0]).flatten().quantile(0.3)
            state = layer(state, mask)
        found = model(x, mask)
        single = torch.cat([model(x[n : n + 1], mask[n : n + 1]) for n in range(3)])
    with torch.no_grad():
        expected, history = skimmed(model, x, mask, gates, 0.5, per_sample)
    assert any(len(row) < 6 for sample in history for row in sample)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if per_sample:
        assert any(len({len(sample[n]) for sample in history}) > 1 for n in range(3))
        torch.testing.assert_close(found, single, rtol=1e-5, atol=1e-5)
    else:
        assert float((found - single).abs().max()) > 1e-3  # The batch matters, as published.


def test_with_threshold_0_nothing_is_skipped() -> None:
    model, (x, mask) = Encoder().eval(), tokens()
    with torch.no_grad():
        with amanda.apply(tool := PruneAttention(0.0, SIZE)):
            dense, found = model(x, mask), model(x, mask)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            torch.testing.assert_close(found, model(x, mask), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, dense, rtol=1e-6, atol=1e-6)
    assert tool.result().kept == 1


@pytest.mark.parametrize("least", [1, 2])
def test_the_loss_of_gates_is_the_cross_entropy_of_answers(least: int) -> None:
    model, (x, mask) = Encoder(), tokens()
    tool = PruneAttention(block=SIZE, seed=4)
    answer = torch.zeros(3, x.shape[1])
    answer[0, 5], answer[1, 17:20], answer[2, 31:33] = 1, 1, 1
    with amanda.apply(tool):
        model(x, mask)
        model(x, mask)
        loss = tool.loss(answer, balance=3.0, least=least)
        loss.backward()
    expected = 0.0
    for logits in tool.terms.values():
        total, weights = 0.0, 0.0
        for s in range(3):
            for n in range(6):
                held = int(answer[s, n * SIZE : (n + 1) * SIZE].sum()) >= least
                weight = 3.0 if held else 1.0
                total -= weight * float(logits[s, n].detach().log_softmax(-1)[int(held)])
                weights += weight
        expected += total / weights
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert all(float(gate[0].weight.grad.abs().sum()) > 0 for gate in tool.gates.values())


def test_a_length_that_has_no_whole_blocks_is_refused() -> None:
    model, (x, mask) = Encoder().eval(), tokens()
    with amanda.apply(PruneAttention(block=SIZE)):
        model(x, mask)
        with pytest.raises(ToolError, match="43 tokens are not a multiple of 8"):
            model(x[:, :43], mask[..., :43])


# All three.


def test_gates_continue_from_a_file_and_are_removed(tmp_path: Path) -> None:
    model, x = residual(), images(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tool = PrunePositions(steps=10)
    with amanda.apply(tool):
        for _ in range(3):
            optimizer.zero_grad()
            (model(x).square().mean() + tool.loss()).backward()
            if tool.gates and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": tool.parameters()})
            optimizer.step()
    path = tool.save(tmp_path / "gates.safetensors")
    model.eval()
    plain = model(x).detach()
    with torch.no_grad(), amanda.apply(tool):
        expected = model(x)
    other = PrunePositions(steps=10, state=str(path))
    assert other.step == 3
    with torch.no_grad(), amanda.apply(other):
        assert torch.equal(model(x), plain)
        assert torch.equal(model(x), expected)
    assert not torch.equal(expected, plain)
    with pytest.raises(ResultError, match="options"):
        PrunePositions(steps=11).load(path)
    with pytest.raises(ToolError, match="depends on the input"):
        other.bake()
    other.remove()
    with torch.no_grad(), amanda.apply(other):
        assert torch.equal(model(x), plain)
    found = json.loads(tool.result().to_json())
    assert found["format"] == "amanda.prune_positions/1"
    assert len(found["ops"]) == 5
    (measure,) = found["charts"][1]["measures"]
    assert measure["values"] == ["share"]
    assert measure["unit"] == "%"
    assert tool.result().table().rows[0][0] == "2.first/conv2d"


def test_gates_do_not_change_the_random_numbers_of_the_program() -> None:
    model, x = convolutions(), images()
    torch.manual_seed(1)
    with amanda.apply(PruneChannels()):
        model(x)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))


@pytest.mark.parametrize("kind", [PruneChannels, PrunePositions, PruneAttention])
def test_a_model_without_what_is_gated_is_named(kind: Any) -> None:
    with amanda.apply(tool := kind()):
        for _ in range(3):
            nn.Linear(4, 4)(torch.ones(2, 4))
    assert str(tool.result().table().title).startswith("nothing was gated: there was no ")
    content = json.loads(tool.result().to_json())
    assert content["notes"] == [tool.result().table().title]
    assert [one["kind"] for one in content["charts"]] == ["figures"], "no chart without bars"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PruneChannels, {"density": 0.0}),
        (PruneChannels, {"pooling": "max"}),
        (PrunePositions, {"budget": 2.0}),
        (PruneAttention, {"block": 6}),
        (PruneAttention, {"threshold": -1.0}),
    ],
)
def test_impossible_options_are_refused(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"density|pooling|budget|block"):
        kind(**options)
