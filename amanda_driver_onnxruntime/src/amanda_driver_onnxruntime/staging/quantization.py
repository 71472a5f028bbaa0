"""`quantized`: numbers that QuantizeLinear and DequantizeLinear compute."""

from __future__ import annotations

from typing import Any

import numpy
from onnx import TensorProto, helper

from amanda_driver_onnxruntime.staging.recording import Staged, is_single, plain

__all__ = ["quantized"]

#: Smallest and largest number, type, and the first opset whose operators have it.
_INTEGERS = (
    (-8, 7, TensorProto.INT4, 21),
    (0, 15, TensorProto.UINT4, 21),
    (-128, 127, TensorProto.INT8, 13),
    (0, 255, TensorProto.UINT8, 13),
)
_OF_HALF_BYTES = (TensorProto.INT4, TensorProto.UINT4)
#: The first opset in which a constant may have a scale for each of its blocks.
_OLDEST_BLOCKS = 21


def quantized(x: Staged, scale: Any, zero: Any, limits: tuple[float, float]) -> Staged:
    """Return what `Arithmetic.quantized` returns, by QuantizeLinear and DequantizeLinear.

    A constant becomes integers. Numbers that these operators do not have are computed as real ones.
    """
    recorder, given = x.recorder, numpy.asarray(plain(scale), numpy.float32)
    low, high, number = int(limits[0]), int(limits[1]), 0 if zero is None else zero
    fits = [
        (least, most, element)
        for least, most, element, since in _INTEGERS
        if least <= low
        and high <= most
        and recorder.opset >= since
        # What is computed has no kernels for halves of bytes everywhere.
        and (x.is_constant or element not in _OF_HALF_BYTES)
    ]
    how, factor = _axes(x, given)
    varies = isinstance(scale, Staged) and not scale.is_constant
    of_any_size = varies and not is_single(scale)
    is_usual = x.dtype == numpy.float32 and not isinstance(number, Staged)
    if not fits or not is_usual or how is None or of_any_size:
        numbers = numpy.round(x / scale)
        found: Staged = (numpy.clip(numbers + number, low, high) - number) * scale
        return found
    least, most, element = fits[0]
    with numpy.errstate(all="ignore"):
        integers = numpy.clip(numpy.round(x.value / given) + number, low, high)
        value = ((integers - number) * given).astype(numpy.float32)
    dtype = helper.tensor_dtype_to_np_dtype(element)
    zeros = numpy.broadcast_to(number, given.shape).reshape(factor.shape).astype(dtype)
    if varies:
        factor = recorder.add("Reshape", [scale, numpy.zeros(0, numpy.int64)], factor)
    numbers = integers.astype(dtype)
    if not x.is_constant:
        if (low, high) != (least, most):  # The operators know only all numbers of a type.
            limited: Any = numpy.clip(x, (low - number) * scale, (high - number) * scale)
            x = limited
        numbers = recorder.add("QuantizeLinear", [x, factor, zeros], numbers, **how)
    return recorder.add("DequantizeLinear", [numbers, factor, zeros], value, **how)


def _axes(x: Staged, scale: Any) -> tuple[dict[str, Any] | None, Any]:
    """Return the attributes that say along which axes there are scales, and these in that form.

    Returns:
        None instead of attributes, if the operators have no such scales.
    """
    axes = [n - scale.ndim + x.ndim for n, size in enumerate(scale.shape) if size != 1]
    if len(axes) < 2:
        return {"axis": axes[0] if axes else None}, scale.reshape(-1 if axes else ())
    # All elements along one axis are a block.
    blocks = [n for n, size in enumerate(scale.shape) if size == 1]
    is_blocks = len(axes) == x.ndim - 1 == scale.ndim - len(blocks)
    if not (x.is_constant and x.recorder.opset >= _OLDEST_BLOCKS and is_blocks):
        return None, scale
    return {"axis": blocks[0], "block_size": x.shape[blocks[0]]}, scale
