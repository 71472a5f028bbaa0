"""Image classifiers with published costs, and BERT, with random weights.

ResNet-50, VGG-19, Inception-v3 and ViT-B/16 have torchvision's layouts. Importing this module
imports only torch.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def from_transformers(model: str, config: str, **settings: Any) -> nn.Module:
    """Return a model in evaluation mode; nothing is downloaded."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    library = importlib.import_module("transformers")
    network = getattr(library, model)(getattr(library, config)(**settings))
    assert isinstance(network, nn.Module)
    return network.eval()


def resnet50() -> nn.Module:
    return from_transformers("ResNetForImageClassification", "ResNetConfig", num_labels=1000)


def vit_b16() -> nn.Module:
    return from_transformers("ViTForImageClassification", "ViTConfig", num_labels=1000)


def bert_base(attention: str) -> nn.Module:
    return from_transformers("BertModel", "BertConfig", attn_implementation=attention)


class FusedBert(nn.Module):
    """BERT-base built from PyTorch's own layers, which fuse each layer into one operator."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(768, 12, 3072, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 12)
        self.pooler = nn.Linear(768, 768)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self.pooler(self.encoder(x)[:, 0]).tanh()
        return pooled


def vgg19() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width, depth in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(depth):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(4096, 1000)).eval()


class Branches(nn.Module):
    """Runs several modules on one input and joins their channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def conv(channels: int, width: int, size: int | tuple[int, int] = 1, stride: int = 1) -> nn.Module:
    """Return convolution, batch norm and ReLU; padded unless it strides."""
    height, breadth = (size, size) if isinstance(size, int) else size
    padding = (height // 2, breadth // 2) if stride == 1 else (0, 0)
    layer = nn.Conv2d(channels, width, (height, breadth), stride, padding, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(width), nn.ReLU())


def chain(channels: int, *steps: tuple[Any, ...]) -> nn.Module:
    """Return consecutive convolutions; each step is the arguments of `conv` after the first."""
    layers = []
    for step in steps:
        layers.append(conv(channels, *step))
        channels = step[0]
    return nn.Sequential(*layers)


def inception_v3() -> nn.Module:
    def pool() -> nn.Module:
        return nn.AvgPool2d(3, 1, 1)

    def first(c: int, pooled: int) -> nn.Module:
        return Branches(
            conv(c, 64),
            chain(c, (48,), (64, 5)),
            chain(c, (64,), (96, 3), (96, 3)),
            nn.Sequential(pool(), conv(c, pooled)),
        )

    def second(w: int) -> nn.Module:
        far = chain(768, (w,), (w, (7, 1)), (w, (1, 7)), (w, (7, 1)), (192, (1, 7)))
        near = chain(768, (w,), (w, (1, 7)), (192, (7, 1)))
        return Branches(conv(768, 192), near, far, nn.Sequential(pool(), conv(768, 192)))

    def third(c: int) -> nn.Module:
        def fork() -> nn.Module:
            return Branches(conv(384, 384, (1, 3)), conv(384, 384, (3, 1)))

        return Branches(
            conv(c, 320),
            nn.Sequential(conv(c, 384), fork()),
            nn.Sequential(chain(c, (448,), (384, 3)), fork()),
            nn.Sequential(pool(), conv(c, 192)),
        )

    def unpadded(c: int, width: int) -> nn.Module:
        layer = nn.Conv2d(c, width, 3, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(width), nn.ReLU())

    return nn.Sequential(
        conv(3, 32, 3, 2),
        unpadded(32, 32),
        conv(32, 64, 3),
        nn.MaxPool2d(3, 2),
        conv(64, 80),
        unpadded(80, 192),
        nn.MaxPool2d(3, 2),
        first(192, 32),
        first(256, 64),
        first(288, 64),
        Branches(
            conv(288, 384, 3, 2),
            chain(288, (64,), (96, 3), (96, 3, 2)),
            nn.MaxPool2d(3, 2),
        ),
        *(second(width) for width in (128, 160, 160, 192)),
        Branches(
            chain(768, (192,), (320, 3, 2)),
            chain(768, (192,), (192, (1, 7)), (192, (7, 1)), (192, 3, 2)),
            nn.MaxPool2d(3, 2),
        ),
        third(1280),
        third(2048),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2048, 1000),
    ).eval()


#: Name -> how to build it, the side of its images, and the published cost in 10^9
#: multiply-accumulates (torchvision's documentation of its weights).
CLASSIFIERS: dict[str, tuple[Callable[[], nn.Module], int, float]] = {
    "ResNet-50": (resnet50, 224, 4.089),
    "VGG-19": (vgg19, 224, 19.632),
    "Inception-v3": (inception_v3, 299, 5.713),
    "ViT-B/16": (vit_b16, 224, 17.564),
}
