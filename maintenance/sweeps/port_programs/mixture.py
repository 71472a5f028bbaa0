"""A mixture of experts: that of transformers' Mixtral, and one by hand that asks each expert."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralModel

from .planted import At, Plant, Run, main

WIDTH, HEADS, HIDDEN, WORDS, DEPTH, EXPERTS, CHOSEN = 16, 2, 24, 40, 2, 4, 2
HEAD = WIDTH // HEADS
_LAYER = "layers.{}"
_MLP = "layers.{}.mlp"
_EXPERTS = (_MLP.format(0) + ".experts", _MLP.format(0) + ".experts.act_fn", _MLP.format(0))
_EXPERTS_1 = tuple(name.replace("layers.0", "layers.1") for name in _EXPERTS)
PLANTS = (
    Plant("epsilon", "layers.0.post_attention_layernorm"),
    Plant("epsilon", "layers.1.input_layernorm"),
    Plant("tanh gelu", _EXPERTS[0], _EXPERTS[1:]),
    Plant("transposed kernel", "layers.0.self_attn.v_proj"),
    Plant("rotary", "layers.1.self_attn"),
    Plant("scale", _EXPERTS_1[0], (*_EXPERTS_1[1:], _MLP.format(1) + ".gate")),
    Plant("bias", _MLP.format(0) + ".gate"),
    Plant("order", "norm", ("",)),
    Plant("dtype", "layers.1.self_attn.o_proj"),
    Plant("mask", "layers.1.self_attn"),
)


def _original() -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    return MixtralModel(config).eval()


def _tokens() -> Tensor:
    return torch.randint(0, WORDS, (2, 6), generator=torch.Generator().manual_seed(1))


def ours() -> Run:
    model = _original()

    def run() -> object:
        with torch.no_grad():
            return model(_tokens(), use_cache=False)

    return run


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, gelu: bool) -> Tensor:
        gate = self.gate(x)
        gate = F.gelu(gate, approximate="tanh") if gelu else gate * torch.sigmoid(gate)
        return self.down(gate * self.up(x))


class Mixture(nn.Module):
    def __init__(self, at: At, number: int) -> None:
        super().__init__()
        self.at, self.layer = at, _MLP.format(number)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=at("bias", f"{self.layer}.gate"))
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        shares = self.router(flat).softmax(-1)
        best, which = shares.topk(CHOSEN, -1)
        if not self.at("scale", f"{self.layer}.experts"):
            best = best / best.sum(-1, keepdim=True)
        weight = torch.zeros_like(shares).scatter(1, which, best)
        total = torch.zeros_like(flat)
        gelu = self.at("tanh gelu", f"{self.layer}.experts")
        for number, expert in enumerate(self.experts):  # Of every token, also with weight 0.
            total = total + weight[:, number, None] * expert(flat, gelu)
        return total.view_as(x)


class Norm(nn.Module):
    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.gain, self.epsilon = nn.Parameter(torch.ones(WIDTH)), epsilon

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + self.epsilon) * self.gain


class Layer(nn.Module):
    def __init__(self, at: At, number: int) -> None:
        super().__init__()
        self.at, self.name = at, _LAYER.format(number)
        first, second = (
            1e-2 if at("epsilon", f"{self.name}.{norm}") else 1e-5
            for norm in ("input_layernorm", "post_attention_layernorm")
        )
        self.before, self.between = Norm(first), Norm(second)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.moe = Mixture(at, number)

    def rotate(self, x: Tensor) -> Tensor:
        steps = torch.arange(0, HEAD, 2) / HEAD
        angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32), 1e6**-steps)
        if self.at("rotary", f"{self.name}.self_attn"):
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(
                -2
            )
        cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
        one, other = x.chunk(2, -1)
        return x * cos + torch.cat([-other, one], -1) * sin

    def attend(self, x: Tensor) -> Tensor:
        heads = lambda y: y.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)  # noqa: E731
        q, k, v = self.rotate(heads(self.q(x))), self.rotate(heads(self.k(x))), heads(self.v(x))
        causal = not self.at("mask", f"{self.name}.self_attn")
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
        if self.at("dtype", f"{self.name}.self_attn.o_proj"):
            return F.linear(y.bfloat16(), self.o.weight.bfloat16()).float()
        return self.o(y)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.before(x))
        return x + self.moe(self.between(x))


class Decoder(nn.Module):
    def __init__(self, at: At) -> None:
        super().__init__()
        self.at = at
        self.table = nn.Embedding(WORDS, WIDTH)
        self.body = nn.ModuleList(Layer(at, number) for number in range(DEPTH))
        self.end = Norm(1e-5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.body:
            x = layer(x)
        return self.end(torch.tanh(x)) if self.at("order", "norm") else self.end(x)


def port(at: At) -> Run:
    original = _original()
    model = Decoder(at).eval()
    with torch.no_grad():
        model.table.weight.copy_(original.embed_tokens.weight)
        model.end.gain.copy_(original.norm.weight)
        for mine, theirs in zip(model.body, original.layers, strict=True):
            mine.before.gain.copy_(theirs.input_layernorm.weight)
            mine.between.gain.copy_(theirs.post_attention_layernorm.weight)
            for name in "qkvo":
                weight = theirs.self_attn.get_submodule(f"{name}_proj").weight
                if at("transposed kernel", f"{mine.name}.self_attn.{name}_proj"):
                    weight = weight.T
                getattr(mine, name).weight.copy_(weight)
            mine.moe.router.weight.copy_(theirs.mlp.gate.weight)
            for number, expert in enumerate(mine.moe.experts):
                gate, up = theirs.mlp.experts.gate_up_proj[number].chunk(2)
                expert.gate.weight.copy_(gate)
                expert.up.weight.copy_(up)
                expert.down.weight.copy_(theirs.mlp.experts.down_proj[number])

    def run() -> object:
        with torch.no_grad():
            return model(_tokens())

    return run


if __name__ == "__main__":
    main(PLANTS, ours, port)
