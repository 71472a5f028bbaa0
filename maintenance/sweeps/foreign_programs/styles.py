"""Programs in the styles of repositories that are cloned and not installed.

Each is our own, in the manner of such code: optimizers of a few functions, blocks whose
`forward` is called, caches that are written in place, and losses made by hand.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators
# Much in torch is not annotated.

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from maintenance.sweeps.foreign import Note

from .catalog import SAVES, WRITTEN, program

WIDTH, HEADS, WORDS, LENGTH = 16, 2, 32, 8


def _norm(x: Any) -> Any:
    # `F.rms_norm` has several nodes on the CPU, whose gradients are summed first under identities.
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def _rotated(x: Any, start: int = 0) -> Any:
    """Rotate pairs of features by angles of their positions."""
    half = x.shape[-1] // 2
    at = torch.arange(start, start + x.shape[1]).float()
    angles = torch.outer(at, 100.0 ** -(torch.arange(half) / half))[None, :, None]
    first, second = x[..., :half], x[..., half:]
    turned = first * angles.cos() + second * angles.sin()
    return torch.cat((turned, second * angles.cos() - first * angles.sin()), -1)


class Cache:
    """Keys and values of earlier positions, in buffers that are written in place."""

    def __init__(self, layers: int) -> None:
        self.kept = torch.zeros(layers, 2, 1, LENGTH, HEADS, WIDTH // HEADS)
        self.length = 0

    def extended(self, layer: int, key: Any, value: Any) -> Any:
        """Return all keys and values, with those of new positions."""
        end = self.length + key.shape[1]
        self.kept[layer, 0, :, self.length : end] = key
        self.kept[layer, 1, :, self.length : end] = value
        return self.kept[layer, 0, :, :end], self.kept[layer, 1, :, :end]


class Block(nn.Module):
    """Attention with rotated and normalized queries and keys, and a squared ReLU."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.read = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.write = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Any, cache: Cache | None = None) -> Any:
        """Return the residual stream after this block."""
        start = cache.length if cache else 0
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        query, key, value = (part.view(shape) for part in self.read(_norm(x)).chunk(3, -1))
        query, key = _norm(_rotated(query, start)), _norm(_rotated(key, start))
        if cache:
            key, value = cache.extended(self.layer, key, value)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=x.shape[1] > 1)
        x = x + self.write(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(self.up(_norm(x)).relu().square())


class Chat(nn.Module):
    """A language model with limited logits, whose blocks are called by `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(layer) for layer in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Any, labels: Any = None, cache: Cache | None = None) -> Any:
        """Return the loss, or without labels the logits."""
        x = _norm(self.words(tokens))
        for block in self.blocks:
            x = block.forward(x, cache)
        if cache:
            cache.length += tokens.shape[1]
        logits = 15 * torch.tanh(self.head(_norm(x)) / 15)
        if labels is None:
            return logits
        return F.cross_entropy(logits.view(-1, WORDS), labels.reshape(-1), ignore_index=-1)


def _orthogonal(matrix: Any, steps: int = 3) -> Any:
    """Return the nearest matrix with orthogonal rows, by Newton and Schulz."""
    x = matrix / (matrix.norm() + 1e-7)
    x = x.T if (tall := matrix.shape[0] > matrix.shape[1]) else x
    for _ in range(steps):
        product = x @ x.T
        x = 3.4445 * x + (-4.775 * product + 2.0315 * product @ product) @ x
    return x.T if tall else x


class Momentum(torch.optim.Optimizer):
    """Steps of orthogonal matrices, for all parameters of a group together."""

    def __init__(self, params: Iterable[Any], lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(s, closure: Any = None) -> None:  # type: ignore[override]  # noqa: D102
        for group in s.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            kept = [s.state[p].setdefault("kept", torch.zeros_like(p)) for p in with_gradient]
            torch._foreach_lerp_(kept, [p.grad for p in with_gradient], 0.1)
            for parameter, direction in zip(with_gradient, map(_orthogonal, kept), strict=True):
                parameter.add_(direction, alpha=-group["lr"])


@program("in the style of nanochat: two optimizers, accumulation, and an engine with a cache")
def chat(note: Note) -> None:
    """Train with gradients of two batches, then generate with keys and values that are kept."""
    model = Chat()
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [model.words.weight, model.head.weight]
    optimizers = [Momentum(matrices), torch.optim.AdamW(others, fused=True)]
    tokens = torch.randint(0, WORDS, (2, LENGTH + 1))
    for step in range(2):
        for group in optimizers[0].param_groups:
            group["lr"] = 0.02 * (1 - step / 2)
        for _ in range(2):
            loss = model(tokens[:, :-1], tokens[:, 1:]) / 2
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        note.training(model, loss)
        model.zero_grad(set_to_none=True)
    with torch.inference_mode():
        cache, feed, found = Cache(2), tokens[:1, :3], []
        for _ in range(4):
            scores = model(feed, cache=cache)[:, -1].topk(5)
            drawn = torch.multinomial(scores.values.softmax(-1), 1)
            feed = scores.indices.gather(-1, drawn)
            found.append(feed)
        note("generated", found)
        note("cache", cache.kept)


@program("in the style of llama2.c: a model that keeps its last loss, and forward calls alone")
def kept_loss(note: Note) -> None:
    """Train by calls of `forward`, with clipping and a schedule by hand."""
    model = Chat()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW(decayed, betas=(0.9, 0.95))
    average = [p.detach().clone() for p in decayed]
    tokens = torch.randint(0, WORDS, (2, LENGTH + 1))
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1, (step + 1) / 2)
        last_loss = model.forward(tokens[:, :-1], tokens[:, 1:])
        last_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        torch._foreach_lerp_(average, [p.detach() for p in decayed], 0.5)
        note.training(model, last_loss)
        optimizer.zero_grad(set_to_none=True)
    note("average", average)


@program("in the style of a minimal Mamba: a scan that is a loop", {"conv1d": 2, "einsum": 26})
def scan(note: Note) -> None:
    """Train a selective state space whose steps are written out."""
    inner, states = 12, 4
    model = nn.ModuleDict(
        {
            "take": nn.Linear(WIDTH, 2 * inner, bias=False),
            "mix": nn.Conv1d(inner, inner, 4, groups=inner, padding=3),
            "choose": nn.Linear(inner, 2 * states + 1, bias=False),
            "give": nn.Linear(inner, WIDTH, bias=False),
        }
    )
    decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
    x = torch.randn(2, 6, WIDTH)
    optimizer = torch.optim.SGD([*model.parameters(), decay], 0.05)
    for _ in range(2):
        value, gate = model["take"](x).chunk(2, -1)
        value = F.silu(model["mix"](value.mT)[..., : x.shape[1]].mT)
        enter, leave, step = model["choose"](value).split([states, states, 1], -1)
        step = F.softplus(step)
        kept = torch.exp(torch.einsum("bli,is->blis", step.expand_as(value), -decay.exp()))
        state, found = torch.zeros(2, inner, states), []
        for at in range(x.shape[1]):
            new = torch.einsum("bi,bs->bis", step[:, at] * value[:, at], enter[:, at])
            state = kept[:, at] * state + new
            found.append(torch.einsum("bis,bs->bi", state, leave[:, at]))
        loss = (model["give"](torch.stack(found, 1) * F.silu(gate)) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        note.training(model, loss)


@program(
    "in the style of minimal DPO: a frozen reference, and odds by hand",
    {"log_sigmoid": 2},
    notice=SAVES,
)
def preferences(note: Note) -> None:
    """Train on pairs of answers against a copy of the model."""
    model = Chat()
    reference = Chat()
    reference.load_state_dict(model.state_dict())
    reference.requires_grad_(False)
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    chosen, rejected = torch.randint(0, WORDS, (2, 3, LENGTH))

    def chance(network: Chat, answers: Any) -> Any:
        logits = network(answers[:, :-1]).log_softmax(-1)
        return logits.gather(-1, answers[:, 1:, None]).squeeze(-1).sum(-1)

    for _ in range(2):
        with torch.no_grad():
            before = chance(reference, chosen) - chance(reference, rejected)
        odds = chance(model, chosen) - chance(model, rejected) - before
        loss = -F.logsigmoid(0.1 * odds).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        note.training(model, loss)


@program(
    "in the style of minimal diffusion: noise, an average of weights, and samples",
    left_alone={"detach": WRITTEN},
)
def noise(note: Note) -> None:
    """Train to tell noise from values, and sample with the averaged weights."""
    model = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 2))
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    kept = torch.linspace(0.999, 0.9, 5).cumprod(0)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True, foreach=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=3)
    for _ in range(3):
        values, added = torch.randn(6, 2), torch.randn(6, 2)
        time = torch.randint(0, 5, (6, 1))
        given = kept[time].sqrt() * values + (1 - kept[time]).sqrt() * added
        loss = F.mse_loss(model(torch.cat((given, time / 5), 1)), added)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        note.training(model, loss)
    with torch.no_grad():
        x = torch.randn(4, 2)
        for at in reversed(range(5)):
            guess = average(torch.cat((x, torch.full((4, 1), at / 5)), 1))
            x = (x - (1 - kept[at]).sqrt() * guess) / kept[at].sqrt()
            x = kept[max(at - 1, 0)].sqrt() * x + (1 - kept[max(at - 1, 0)]).sqrt() * guess
    note("samples", x)
