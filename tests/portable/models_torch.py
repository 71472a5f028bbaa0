"""The network of `models` in PyTorch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .models import IMAGES, LABELS, RATE, WEIGHTS, Effect, Record

__all__ = ["TorchProgram"]


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, mask: Tensor, mask_gradient: bool) -> Tensor:
        ctx.mask = mask if mask_gradient else None
        return weight * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient if ctx.mask is None else gradient * ctx.mask, None, None


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


# Untyped in torch's stubs.
_masked: Any = _Masked.apply
_scaled_gradient: Any = _ScaledGradient.apply


def _swish(x: Tensor) -> Tensor:
    return x / (1.0 + math.e ** (-x))


class TorchProgram:
    """Eager PyTorch."""

    def __init__(self, effect: Effect) -> None:
        self.effect = effect
        self.record = Record()
        self.weights: dict[str, Tensor] = {}

    def build(self) -> None:
        """Make the leaves."""
        self.weights = {n: torch.tensor(w, requires_grad=True) for n, w in WEIGHTS.items()}

    def weight(self, name: str) -> Tensor:
        """Return a weight, masked if the program says so."""
        masks = self.effect.masks
        if masks is None or name not in masks:
            return self.weights[name]
        mask = torch.tensor(masks[name])
        masked = _masked(self.weights[name], mask, self.effect.mask_gradients)
        assert isinstance(masked, Tensor)
        return masked

    def scaled(self, x: Tensor) -> Tensor:
        """Return `x` with its gradient scaled if the program says so."""
        factor = self.effect.relu_gradient
        return x if factor is None else _scaled_gradient(x, factor)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits. Each call of an operator has its own line, which identifies it."""
        w, relu = self.weight, _swish if self.effect.swish else torch.relu
        x = F.conv2d(x, w("conv1.weight"), w("conv1.bias"), padding=1)
        x = self.scaled(relu(x))
        x = F.max_pool2d(x, 2)
        x = F.conv2d(x, w("conv2.weight"), w("conv2.bias"), stride=2, padding=1)
        x = self.scaled(relu(x))
        x = F.linear(x.flatten(1), w("dense1.weight"), w("dense1.bias"))
        x = self.scaled(relu(x))
        return F.linear(x, w("dense2.weight"), w("dense2.bias"))

    def step(self, number: int) -> None:
        """Perform one step of gradient descent and record it."""
        logits = self.logits(torch.from_numpy(IMAGES[number]))
        loss = F.cross_entropy(logits, torch.from_numpy(LABELS[number]))
        gradients = torch.autograd.grad(loss, list(self.weights.values()))
        with torch.no_grad():
            for weight, gradient in zip(self.weights.values(), gradients, strict=True):
                weight -= RATE * gradient
        self.record.losses.append(loss.item())
        self.record.logits.append(logits.detach().numpy())
        self.record.gradients.append(
            {n: g.numpy() for n, g in zip(self.weights, gradients, strict=True)}
        )

    def finish(self) -> None:
        """Record the weights."""
        self.record.weights = {n: w.detach().numpy() for n, w in self.weights.items()}
