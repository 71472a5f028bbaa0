"""A decoder with rotary positions and grouped queries: that of transformers, and one by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from .planted import At, Plant, Run, main

WIDTH, HEADS, GROUPS, HIDDEN, WORDS, DEPTH = 32, 4, 2, 48, 50, 3
HEAD = WIDTH // HEADS
EPSILON = 1e-6
_ATTENTION = "model.layers.{}.self_attn"
_MLP = "model.layers.{}.mlp"
PLANTS = (
    Plant("epsilon", "model.layers.1.post_attention_layernorm"),
    Plant("epsilon", "model.norm"),
    Plant("tanh gelu", _MLP.format(1), (_MLP.format(1) + ".act_fn",)),
    Plant("transposed kernel", _ATTENTION.format(0) + ".o_proj"),
    Plant("rotary", _ATTENTION.format(1)),
    Plant("scale", _ATTENTION.format(2)),
    Plant("bias", _MLP.format(0) + ".down_proj"),
    Plant("order", "model.layers.1.input_layernorm", (_ATTENTION.format(1) + ".q_proj",)),
    Plant("dtype", _MLP.format(2) + ".gate_proj"),
    Plant("mask", _ATTENTION.format(0)),
    Plant("groups", _ATTENTION.format(1)),
)


def _original() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        rms_norm_eps=EPSILON,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def _tokens() -> Tensor:
    return torch.randint(0, WORDS, (2, 7), generator=torch.Generator().manual_seed(1))


def ours() -> Run:
    model = _original()

    def run() -> object:
        with torch.no_grad():
            return model(_tokens(), use_cache=False)

    return run


class Norm(nn.Module):
    def __init__(self, at: At, layer: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.epsilon = 1e-2 if at("epsilon", layer) else EPSILON

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), self.scale, self.epsilon)


class Attention(nn.Module):
    def __init__(self, at: At, number: int) -> None:
        super().__init__()
        self.at, self.layer = at, _ATTENTION.format(number)
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.wv = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], dtype=torch.float32)
        angles = torch.outer(places, 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD))[:, None]
        if self.at("rotary", self.layer):  # Pairs of neighbours, as in Meta's own code.
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(
                -2
            )
        one, other = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.rotate(self.wq(x).view(batch, length, HEADS, HEAD)).transpose(1, 2)
        k = self.rotate(self.wk(x).view(batch, length, GROUPS, HEAD)).transpose(1, 2)
        v = self.wv(x).view(batch, length, GROUPS, HEAD).transpose(1, 2)
        if self.at("groups", self.layer):
            k, v = k.repeat(1, HEADS // GROUPS, 1, 1), v.repeat(1, HEADS // GROUPS, 1, 1)
        else:
            k, v = (t.repeat_interleave(HEADS // GROUPS, 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2)
        if not self.at("scale", self.layer):
            scores = scores * HEAD**-0.5
        if not self.at("mask", self.layer):
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        mixed = scores.softmax(-1) @ v
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class FeedForward(nn.Module):
    def __init__(self, at: At, number: int) -> None:
        super().__init__()
        self.at, self.layer = at, _MLP.format(number)
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=at("bias", f"{self.layer}.down_proj"))

    def forward(self, x: Tensor) -> Tensor:
        if self.at("dtype", f"{self.layer}.gate_proj"):
            gate = F.linear(x.bfloat16(), self.w1.weight.bfloat16()).float()
        else:
            gate = self.w1(x)
        gate = (
            F.gelu(gate, approximate="tanh") if self.at("tanh gelu", self.layer) else F.silu(gate)
        )
        return self.w2(gate * self.w3(x))


class Block(nn.Module):
    def __init__(self, at: At, number: int) -> None:
        super().__init__()
        name = f"model.layers.{number}"
        self.at, self.layer = at, f"{name}.input_layernorm"
        self.ln1, self.ln2 = Norm(at, self.layer), Norm(at, f"{name}.post_attention_layernorm")
        self.att, self.ffn = Attention(at, number), FeedForward(at, number)

    def forward(self, x: Tensor) -> Tensor:
        if self.at("order", self.layer):
            x = x + self.ln1(self.att(x))
        else:
            x = x + self.att(self.ln1(x))
        return x + self.ffn(self.ln2(x))


class Decoder(nn.Module):
    def __init__(self, at: At) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.stack = nn.ModuleList(Block(at, number) for number in range(DEPTH))
        self.last = Norm(at, "model.norm")
        self.out = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.stack:
            x = block(x)
        return self.out(self.last(x))


#: Name of a weight in transformers -> its name here.
TABLE = {
    "model.embed_tokens": "emb",
    "model.layers": "stack",
    "input_layernorm.weight": "ln1.scale",
    "post_attention_layernorm.weight": "ln2.scale",
    "self_attn": "att",
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "mlp": "ffn",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "model.norm.weight": "last.scale",
    "lm_head": "out",
}


def port(at: At) -> Run:
    weights = _original().state_dict()
    renamed = {}
    for name, value in weights.items():
        wrong = at("transposed kernel", name.removesuffix(".weight"))
        for old, new in TABLE.items():
            name = name.replace(old, new)
        renamed[name] = value.T if wrong else value
    torch.manual_seed(2)
    model = Decoder(at).eval()
    model.load_state_dict(renamed, strict=at.plant is None or at.plant.kind != "bias")

    def run() -> object:
        with torch.no_grad():
            return model(_tokens())

    return run


if __name__ == "__main__":
    main(PLANTS, ours, port)
