"""A vision transformer of transformers, and another one with fused projections that PyTorch's
exporter writes as ONNX.
"""

from __future__ import annotations

import io
import logging
import warnings

import numpy
import onnxruntime
import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTModel

from .planted import At, Plant, Run, draw, main

WIDTH, HEADS, HIDDEN, DEPTH, SIZE, PATCH = 24, 3, 48, 2, 16, 4
EPSILON = 1e-6
_IMAGE = draw(2, 3, SIZE, SIZE)


def _original() -> ViTModel:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=HIDDEN,
        image_size=SIZE,
        patch_size=PATCH,
        layer_norm_eps=EPSILON,
        initializer_range=0.2,
    )
    model = ViTModel(config, add_pooling_layer=False).eval()
    for one in model.modules():
        if isinstance(one, nn.LayerNorm | nn.Linear | nn.Conv2d):
            nn.init.normal_(one.bias, 0.0, 0.2)
    return model


def ours() -> Run:
    model = _original()

    def run() -> object:
        with torch.no_grad():
            return model(torch.tensor(_IMAGE))

    return run


PLANTS = (
    Plant("epsilon", "layers.0.layernorm_before"),
    Plant("epsilon", "layernorm"),
    Plant("tanh gelu", "layers.0.mlp.activation_fn", ("layers.0.mlp",)),
    Plant("padding", "embeddings.patch_embeddings.projection", ("embeddings.patch_embeddings",)),
    Plant("transposed kernel", "layers.1.attention.o_proj"),
    Plant("scale", "layers.1.attention"),
    Plant("bias", "layers.0.attention.v_proj"),
    Plant("order", "layers.1.layernorm_after", ("layers.1.mlp.fc1",)),
    Plant("dtype", "layers.1.mlp.fc2"),
    Plant("positions", "embeddings"),
)


class Attention(nn.Module):
    def __init__(self, at: At, number: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wrong = at("scale", f"layers.{number}.attention")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q = q if self.wrong else q * (WIDTH // HEADS) ** -0.5
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, at: At, number: int) -> None:
        super().__init__()
        name = f"layers.{number}"
        self.norm1, self.norm2 = (
            nn.LayerNorm(WIDTH, eps=1e-3 if at("epsilon", f"{name}.{norm}") else EPSILON)
            for norm in ("layernorm_before", "layernorm_after")
        )
        self.attn = Attention(at, number)
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        tanh = at("tanh gelu", f"{name}.mlp.activation_fn")
        self.act = nn.GELU(approximate="tanh" if tanh else "none")
        self.after, self.half = (
            at("order", f"{name}.layernorm_after"),
            at("dtype", f"{name}.mlp.fc2"),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        if self.after:
            return self.norm2(x + self.fc2(self.act(self.fc1(x))))
        y = self.act(self.fc1(self.norm2(x)))
        if self.half:
            weight, bias = self.fc2.weight.half(), self.fc2.bias.half()
            return x + nn.functional.linear(y.half(), weight, bias).float()
        return x + self.fc2(y)


class VisionTransformer(nn.Module):
    def __init__(self, at: At) -> None:
        super().__init__()
        self.at = at
        wrong = at("padding", "embeddings.patch_embeddings.projection")
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH, padding=1 if wrong else 0)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.zeros(1, (SIZE // PATCH) ** 2 + 1, WIDTH))
        self.blocks = nn.ModuleList(Block(at, number) for number in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-3 if at("epsilon", "layernorm") else EPSILON)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        x = x + (self.places.flip(1) if self.at("positions", "embeddings") else self.places)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def _weights(at: At) -> dict[str, Tensor]:
    """Return the weights under their names here."""
    theirs = _original().state_dict()
    found = {
        "first": theirs["embeddings.cls_token"],
        "places": theirs["embeddings.position_embeddings"],
    }
    for part in ("weight", "bias"):
        found[f"patches.{part}"] = theirs[f"embeddings.patch_embeddings.projection.{part}"]
        found[f"norm.{part}"] = theirs[f"layernorm.{part}"]
        for number in range(DEPTH):
            layer, block = f"layers.{number}", f"blocks.{number}"
            attention = f"{layer}.attention"
            parts = {name: theirs[f"{attention}.{name}_proj.{part}"] for name in "qkvo"}
            for name in "qkv":
                if at("bias", f"{attention}.{name}_proj") and part == "bias":
                    parts[name] = parts[name] * 0
            if at("transposed kernel", f"{attention}.o_proj") and part == "weight":
                parts["o"] = parts["o"].T
            found[f"{block}.attn.qkv.{part}"] = torch.cat([parts[name] for name in "qkv"])
            found[f"{block}.attn.proj.{part}"] = parts["o"]
            for mine, name in {
                "norm1": "layernorm_before",
                "norm2": "layernorm_after",
                "fc1": "mlp.fc1",
                "fc2": "mlp.fc2",
            }.items():
                found[f"{block}.{mine}.{part}"] = theirs[f"{layer}.{name}.{part}"]
    return found


def port(at: At) -> Run:
    model = VisionTransformer(at).eval()
    model.load_state_dict(_weights(at))
    image = torch.tensor(_IMAGE)
    file = io.BytesIO()
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, (image,), dynamo=True, verbose=False)
    program.save(file)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        file.getvalue(), options, providers=["CPUExecutionProvider"]
    )
    return lambda: session.run(None, {session.get_inputs()[0].name: numpy.asarray(image)})


if __name__ == "__main__":
    main(PLANTS, ours, port)
