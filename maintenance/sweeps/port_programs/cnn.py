"""A residual network with batch normalisation, and its port to Keras."""

from __future__ import annotations

import keras
import numpy
import torch
from torch import Tensor, nn

from .planted import At, Plant, Run, draw, main

CHANNELS, SIZE, CLASSES = 8, 16, 5
_IMAGE = draw(2, 3, SIZE, SIZE)
PLANTS = (
    Plant("epsilon", "norm1"),
    Plant("epsilon", "norm2"),
    Plant("padding", "conv1"),
    Plant("padding", "pool"),
    Plant("transposed kernel", "conv2"),
    Plant("scale", "conv1"),
    Plant("bias", "head"),
    Plant("order", "norm2", ("",)),
    Plant("dtype", "conv2"),
    Plant("flatten", "head"),
)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, CHANNELS, 3, 2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(CHANNELS)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(CHANNELS)
        self.head = nn.Linear(CHANNELS * 16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.norm1(self.conv1(x))))
        x = torch.relu(x + self.norm2(self.conv2(x)))
        return self.head(x.flatten(1)).softmax(-1)


def _original() -> Network:
    torch.manual_seed(0)
    model = Network().eval()
    for one in model.modules():
        if isinstance(one, nn.BatchNorm2d):
            nn.init.normal_(one.weight, 1.0, 0.2)
            nn.init.normal_(one.bias, 0.0, 0.2)
            one.running_mean = torch.randn(CHANNELS) / 4
            one.running_var = torch.rand(CHANNELS) + 0.2
    return model


def ours() -> Run:
    model = _original()

    def run() -> object:
        with torch.no_grad():
            return model(torch.tensor(_IMAGE))

    return run


def port(at: At) -> Run:
    weights = {name: value.numpy() for name, value in _original().state_dict().items()}
    layers = keras.layers

    def convolution(x: object, name: str, stride: int = 1) -> object:
        if at("padding", name):
            padding = "same"
        else:
            x, padding = layers.ZeroPadding2D(1, name=f"{name}_pad")(x), "valid"
        dtype = "bfloat16" if at("dtype", name) else "float32"
        made = layers.Conv2D(
            CHANNELS, 3, stride, padding=padding, use_bias=False, name=name, dtype=dtype
        )
        x = made(x)
        if at("dtype", name):
            x = layers.Activation("linear", dtype="float32", name=f"{name}_cast")(x)
        kernel = weights[f"{name}.weight"].transpose(2, 3, 1, 0)
        made.kernel.assign(kernel.swapaxes(0, 1) if at("transposed kernel", name) else kernel)
        return x

    def norm(x: object, name: str) -> object:
        epsilon = 1e-3 if at("epsilon", name) else 1e-5
        made = layers.BatchNormalization(epsilon=epsilon, name=name)
        x = made(x)
        parts = ("weight", "bias", "running_mean", "running_var")
        made.set_weights([weights[f"{name}.{part}"] for part in parts])
        return x

    image = x = layers.Input((SIZE, SIZE, 3))
    if at("scale", "conv1"):
        x = layers.Rescaling(1 / 255)(x)
    x = layers.ReLU(name="relu1")(norm(convolution(x, "conv1", 2), "norm1"))
    if at("padding", "pool"):
        x = layers.MaxPooling2D(3, 2, padding="same", name="pool")(x)
    else:
        x = layers.ZeroPadding2D(1, name="pool_pad")(x)  # What it pads is not negative here.
        x = layers.MaxPooling2D(3, 2, name="pool")(x)
    y = convolution(x, "conv2")
    if at("order", "norm2"):
        x = layers.ReLU(name="relu2")(norm(layers.Add()([x, y]), "norm2"))
    else:
        x = layers.ReLU(name="relu2")(layers.Add()([x, norm(y, "norm2")]))
    if not at("flatten", "head"):
        x = layers.Permute((3, 1, 2))(x)
    head = layers.Dense(CLASSES, name="head")
    model = keras.Model(image, layers.Softmax()(head(layers.Flatten()(x))))
    bias = weights["head.bias"]
    head.set_weights(
        [weights["head.weight"].T, numpy.zeros_like(bias) if at("bias", "head") else bias]
    )
    # Keras' own function for inference is a graph.
    return lambda: model.predict(_IMAGE.transpose(0, 2, 3, 1), verbose=0)


if __name__ == "__main__":
    main(PLANTS, ours, port)
