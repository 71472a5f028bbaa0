"""A piece of a U-Net, and an ONNX graph of it that was written by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .graphs import Graph
from .planted import At, Plant, Run, draw, main

PLANTS = (
    Plant("epsilon", "down.norm"),
    Plant("epsilon", "up.norm"),
    Plant("padding", "down.conv"),
    Plant("padding", "pool"),
    Plant("transposed kernel", "middle"),
    Plant("scale", "interpolate", ("",)),
    Plant("bias", "head"),
    Plant("order", "up.norm", ("up.act",)),
    Plant("dtype", "up.conv"),
    Plant("slope", "down.act"),
)
_IMAGE = draw(1, 3, 16, 16)


class Stage(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(2, outputs)
        self.act = nn.LeakyReLU(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = Stage(3, 8)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.widen = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.up = Stage(12, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        low = self.middle(self.pool(skip)).relu()
        x = self.up(torch.cat([skip, self.widen(low)], 1))
        return self.head(nn.functional.interpolate(x, scale_factor=2, mode="bilinear")).sigmoid()


def _original() -> UNet:
    torch.manual_seed(0)
    model = UNet().eval()
    for one in model.modules():
        if isinstance(one, nn.GroupNorm):
            nn.init.normal_(one.weight, 1.0, 0.2)
            nn.init.normal_(one.bias, 0.0, 0.2)
    return model


def ours() -> Run:
    model = _original()

    def run() -> object:
        with torch.no_grad():
            return model(torch.tensor(_IMAGE))

    return run


def port(at: At) -> Run:
    weights = {name: value.numpy() for name, value in _original().state_dict().items()}
    g = Graph()

    def convolution(x: str, name: str, padding: int = 1, **attributes: object) -> str:
        kernel, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        if at("transposed kernel", name):
            kernel = kernel.swapaxes(0, 1)
        if at("bias", name):
            bias = bias * 0
        pads = [padding] * 4
        if at("padding", name):
            x, pads = g("Pad", x, [0, 0, 1, 1, 0, 0, 1, 1], mode="edge"), [0] * 4
        if at("dtype", name):
            x, kernel, bias = g("Cast", x, to=10), kernel.astype("f2"), bias.astype("f2")
            return g("Cast", g("Conv", x, kernel, bias, pads=pads, **attributes), to=1)
        return g("Conv", x, kernel, bias, pads=pads, **attributes)

    def norm(x: str, name: str, size: int) -> str:
        epsilon = 1e-2 if at("epsilon", name) else 1e-5
        # Groups are normalised as channels of an image of another shape.
        one = g("Reshape", x, [0, 2, -1])
        one = g("InstanceNormalization", one, [1.0, 1.0], [0.0, 0.0], epsilon=epsilon)
        one = g("Reshape", one, [0, 8, size, size])
        gain, offset = (
            weights[f"{name}.{part}"].reshape(1, 8, 1, 1) for part in ("weight", "bias")
        )
        return g("Add", g("Mul", one, gain), offset)

    def stage(x: str, name: str, size: int) -> str:
        x = convolution(x, f"{name}.conv")
        alpha = 0.01 if at("slope", f"{name}.act") else 0.1
        if at("order", f"{name}.norm"):
            return norm(g("LeakyRelu", x, alpha=alpha), f"{name}.norm", size)
        return g("LeakyRelu", norm(x, f"{name}.norm", size), alpha=alpha)

    skip = stage("image", "down", 16)
    if at("padding", "pool"):  # "SAME" puts all of it at the end.
        pads = [0, 0, 1, 1]
    else:
        pads = [1, 1, 1, 1]
    low = g("MaxPool", skip, kernel_shape=[3, 3], strides=[2, 2], pads=pads)
    low = g("Relu", convolution(low, "middle"))
    wide = g("ConvTranspose", low, weights["widen.weight"], weights["widen.bias"], strides=[2, 2])
    x = stage(g("Concat", skip, wide, axis=1), "up", 16)
    mode = "align_corners" if at("scale", "interpolate") else "half_pixel"
    scales = numpy_scales()
    x = g("Resize", x, "", scales, mode="linear", coordinate_transformation_mode=mode)
    session = g.session(g("Sigmoid", convolution(x, "head", 0)), image=_IMAGE.shape)
    return lambda: session.run(None, {"image": _IMAGE})


def numpy_scales() -> object:
    """Return the factors by which each axis grows."""
    import numpy

    return numpy.array([1, 1, 2, 2], numpy.float32)


if __name__ == "__main__":
    main(PLANTS, ours, port)
