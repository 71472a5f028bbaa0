"""Quantized numbers in programs that are exported, as the operators that other runtimes know.

Owns which of torch's decomposed operators stand for a grid. `torch.onnx` writes them as
QuantizeLinear and DequantizeLinear.
"""

from __future__ import annotations

from typing import Any

import torch

from amanda_driver_torch.torch_internals.dynamo import quantized_operators

__all__ = ["quantized"]

#: Dtype -> its smallest and largest number.
_TYPES = {torch.int8: (-128, 127), torch.uint8: (0, 255)}


def quantized(
    x: torch.Tensor, scale: Any, zero: Any, limits: tuple[float, float]
) -> torch.Tensor | None:
    """Return what `Arithmetic.quantized` returns, by operators for quantized numbers.

    Returns:
        None if there are none for these numbers, which then are computed as real ones.
    """
    low, high = map(int, limits)
    dtype = next((d for d, (a, b) in _TYPES.items() if a <= low and high <= b), None)
    if dtype is None or x.dtype is not torch.float32 or isinstance(zero, torch.Tensor):
        return None
    ops, number = quantized_operators(), int(zero or 0)
    if not isinstance(scale, torch.Tensor):
        if (low, high) != _TYPES[dtype]:  # Other runtimes know only all numbers of a type.
            x = x.clamp((low - number) * scale, (high - number) * scale)
        given = (scale, number, *_TYPES[dtype], dtype)
        new: torch.Tensor = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *given), *given)
        return new
    shape = [1] * (x.dim() - scale.dim()) + list(scale.shape)
    axes = [axis for axis, size in enumerate(shape) if size != 1]
    axis, rows = (axes[0] if axes else 0), x
    if len(axes) != 1:
        if axes != list(range(len(axes))):
            return None
        axis, rows = 0, x.reshape(scale.numel(), -1)
    scales = scale.reshape(-1)
    zeros = torch.full_like(scales, number, dtype=torch.int64)
    numbers = ops.quantize_per_channel(rows, scales, zeros, axis, low, high, dtype)
    new = ops.dequantize_per_channel(numbers, scales, zeros, axis, low, high, dtype)
    return new.reshape(x.shape)
