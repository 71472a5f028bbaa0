"""Quantized numbers in programs that are exported, as the operators that other runtimes know.

Owns which of torch's operators stand for a grid: those for fake quantization, which all processes
have, and which `torch.onnx` writes as QuantizeLinear and DequantizeLinear.
"""

from __future__ import annotations

from typing import Any

import torch

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
    if dtype is None or x.dtype is not torch.float32:
        return None
    number: Any = zero if isinstance(zero, torch.Tensor) else int(zero or 0)
    given = _TYPES[dtype]  # Other runtimes know only all numbers of a type.
    if not isinstance(scale, torch.Tensor):
        if (low, high) != _TYPES[dtype]:
            x = x.clamp((low - number) * scale, (high - number) * scale)
        return torch.fake_quantize_per_tensor_affine(x, scale, number, *given)
    shape = [1] * (x.dim() - scale.dim()) + list(scale.shape)
    axes = [axis for axis, size in enumerate(shape) if size != 1]
    axis, rows = (axes[0] if axes else 0), x
    if len(axes) > 1 and axes != list(range(len(axes))):
        return None
    if (low, high) != _TYPES[dtype]:
        rows = rows.clamp((low - number) * scale, (high - number) * scale)
    if len(axes) != 1:
        axis, rows = 0, rows.reshape(scale.numel(), -1)
    scales = scale.reshape(-1)
    zeros = torch.as_tensor(number, dtype=torch.int32).expand(scale.shape).reshape(-1)
    new = torch.fake_quantize_per_channel_affine(rows, scales, zeros, axis, *given)
    return new.reshape(x.shape)
