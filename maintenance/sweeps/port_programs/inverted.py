"""Inverted residual blocks of EfficientNet, and their port to a `tf.function` with Keras."""

from __future__ import annotations

import keras
import tensorflow as tf
import torch
from torch import Tensor, nn

from .planted import At, Plant, Run, draw, main

IN, WIDE, OUT, SQUEEZED, SIZE = 6, 12, 8, 3, 12
_IMAGE = draw(2, IN, SIZE, SIZE)
PLANTS = (
    Plant("epsilon", "blocks.0.bn1"),
    Plant("epsilon", "blocks.1.bn3"),
    Plant("tanh gelu", "blocks.0.act1"),
    Plant("padding", "blocks.0.depthwise"),
    Plant("transposed kernel", "blocks.0.depthwise"),
    Plant("scale", "blocks.1.gate", ("blocks.1",)),
    Plant("bias", "blocks.0.reduce"),
    Plant("order", "blocks.1.bn2", ("blocks.1.act2",)),
    Plant("dtype", "blocks.1.project"),
    Plant("residual", "blocks.1", ("head",)),
)


class Block(nn.Module):
    def __init__(self, inputs: int, stride: int) -> None:
        super().__init__()
        self.expand = nn.Conv2d(inputs, WIDE, 1, bias=False)
        self.bn1, self.act1 = nn.BatchNorm2d(WIDE), nn.SiLU()
        self.depthwise = nn.Conv2d(WIDE, WIDE, 3, stride, 1, groups=WIDE, bias=False)
        self.bn2, self.act2 = nn.BatchNorm2d(WIDE), nn.SiLU()
        self.reduce = nn.Conv2d(WIDE, SQUEEZED, 1)
        self.widen = nn.Conv2d(SQUEEZED, WIDE, 1)
        self.gate = nn.Sigmoid()
        self.project = nn.Conv2d(WIDE, OUT, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(OUT)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.bn1(self.expand(x)))
        y = self.act2(self.bn2(self.depthwise(y)))
        small = nn.functional.silu(self.reduce(y.mean((2, 3), keepdim=True)))
        y = self.bn3(self.project(y * self.gate(self.widen(small))))
        return x + y if x.shape == y.shape else y


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(IN, 2), Block(OUT, 1))
        self.head = nn.Conv2d(OUT, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)).mean((2, 3))


def _original() -> Network:
    torch.manual_seed(0)
    model = Network().eval()
    for one in model.modules():
        if isinstance(one, nn.BatchNorm2d):
            nn.init.normal_(one.weight, 1.0, 0.2)
            nn.init.normal_(one.bias, 0.0, 0.2)
            one.running_mean = torch.randn(one.num_features) / 4
            one.running_var = torch.rand(one.num_features) + 0.2
    return model


def ours() -> Run:
    model = _original()

    def run() -> object:
        with torch.no_grad():
            return model(torch.tensor(_IMAGE))

    return run


def port(at: At) -> Run:
    weights = {name: value.numpy() for name, value in _original().state_dict().items()}
    made: dict[str, keras.layers.Layer] = {}

    def convolution(x: object, name: str, outputs: int) -> object:
        has_bias = f"{name}.bias" in weights
        half = at("dtype", name)
        if name not in made:
            made[name] = keras.layers.Conv2D(
                outputs, 1, use_bias=has_bias, name=name, dtype="float16" if half else "float32"
            )
            made[name].build(x.shape)
            made[name].kernel.assign(weights[f"{name}.weight"].transpose(2, 3, 1, 0))
            if has_bias and not at("bias", name):
                made[name].bias.assign(weights[f"{name}.bias"])
        return tf.cast(made[name](x), tf.float32)

    def depthwise(x: object, name: str, stride: int) -> object:
        kernel = weights[f"{name}.weight"].transpose(2, 3, 0, 1)
        if at("transposed kernel", name):
            kernel = kernel.swapaxes(0, 1)
        if at("padding", name):
            return tf.nn.depthwise_conv2d(x, kernel, [1, stride, stride, 1], "SAME")
        x = tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])
        return tf.nn.depthwise_conv2d(x, kernel, [1, stride, stride, 1], "VALID")

    def norm(x: object, name: str) -> object:
        if name not in made:
            epsilon = 1e-2 if at("epsilon", name) else 1e-5
            made[name] = keras.layers.BatchNormalization(epsilon=epsilon, name=name)
            made[name].build(x.shape)
            parts = ("weight", "bias", "running_mean", "running_var")
            made[name].set_weights([weights[f"{name}.{part}"] for part in parts])
        return made[name](x, training=False)

    def block(x: object, name: str, stride: int) -> object:
        act = tf.nn.silu
        if at("tanh gelu", f"{name}.act1"):
            act = lambda y: tf.nn.gelu(y, approximate=True)  # noqa: E731
        y = act(norm(convolution(x, f"{name}.expand", WIDE), f"{name}.bn1"))
        y = depthwise(y, f"{name}.depthwise", stride)
        if at("order", f"{name}.bn2"):
            y = norm(tf.nn.silu(y), f"{name}.bn2")
        else:
            y = tf.nn.silu(norm(y, f"{name}.bn2"))
        small = tf.reduce_mean(y, [1, 2], keepdims=True)
        small = tf.nn.silu(convolution(small, f"{name}.reduce", SQUEEZED))
        share = convolution(small, f"{name}.widen", WIDE)
        if not at("scale", f"{name}.gate"):
            share = tf.sigmoid(share)
        y = norm(convolution(y * share, f"{name}.project", OUT), f"{name}.bn3")
        return x + y if x.shape == y.shape and not at("residual", name) else y

    def call(x: object) -> object:
        for number, stride in enumerate((2, 1)):
            x = block(x, f"blocks.{number}", stride)
        return tf.reduce_mean(convolution(x, "head", 5), [1, 2])

    image = tf.constant(_IMAGE.transpose(0, 2, 3, 1))
    call(image)
    function = tf.function(call)
    return lambda: function(image)


if __name__ == "__main__":
    main(PLANTS, ours, port)
