"""A perceptron with layer normalisation, and its port to Keras."""

from __future__ import annotations

import keras
import numpy
import tensorflow as tf
import torch
from torch import nn

from .planted import At, Plant, Run, draw, main

WIDTH = 16
_INPUT = draw(4, 8)
PLANTS = (
    Plant("epsilon", "1"),
    Plant("epsilon", "4"),
    Plant("tanh gelu", "2"),
    Plant("tanh gelu", "5"),
    Plant("transposed kernel", "3"),
    Plant("scale", ""),
    Plant("bias", "0"),
    Plant("bias", "6"),
    Plant("order", "4", ("5",)),
    Plant("dtype", "3"),
)


def _original() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, 3),
    ).eval()


def ours() -> Run:
    model = _original()

    def run() -> object:
        with torch.no_grad():
            return model(torch.tensor(_INPUT))

    return run


def port(at: At) -> Run:
    original = _original()
    layers: list[keras.layers.Layer] = []
    for number, layer in enumerate(original):
        name = str(number)
        if isinstance(layer, nn.Linear):
            dtype = "float16" if at("dtype", name) else "float32"
            layers.append(keras.layers.Dense(layer.out_features, dtype=dtype))
        elif isinstance(layer, nn.LayerNorm):
            epsilon = 1e-3 if at("epsilon", name) else layer.eps
            layers.append(keras.layers.LayerNormalization(epsilon=epsilon))
        else:
            tanh = at("tanh gelu", name)
            gelu = lambda x, tanh=tanh: keras.activations.gelu(x, approximate=tanh)  # noqa: E731
            layers.append(keras.layers.Activation(gelu))
    order = list(range(len(layers)))
    if at("order", "4"):
        order[4], order[5] = 5, 4
    model = keras.Sequential([layers[number] for number in order])
    model(tf.zeros((1, 8)))
    for number, theirs in enumerate(original):
        mine, name = layers[number], str(number)
        if isinstance(theirs, nn.Linear):
            kernel, bias = (p.detach().numpy() for p in (theirs.weight, theirs.bias))
            mine.kernel.assign(kernel if at("transposed kernel", name) else kernel.T)
            mine.bias.assign(numpy.zeros_like(bias) if at("bias", name) else bias)
    factor = 255.0 if at("scale", "") else 1.0
    return lambda: model(tf.constant(_INPUT * factor), training=False)


if __name__ == "__main__":
    main(PLANTS, ours, port)
