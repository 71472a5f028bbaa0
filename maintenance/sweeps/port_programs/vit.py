"""A vision transformer of transformers, and another one with fused projections that PyTorch's
exporter writes as ONNX."""

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
