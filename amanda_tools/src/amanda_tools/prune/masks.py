"""Masks by magnitude, their parts, and their products with weights.

Owns the arithmetic on each framework's tensors, which are imported only when needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amanda_core.engine.action import staged
from amanda_core.weights.reads import Weight

__all__ = [
    "array_part",
    "multiply",
    "multiply_items",
    "numpy_mask",
    "torch_keeps",
    "torch_mask",
    "torch_masked",
    "torch_multiply",
    "torch_part",
]


@staged
def multiply(value: Any, mask: Any) -> Any:
    """Set what is pruned to zero in a weight or gradient.

    It has no side effects, so it may become part of a graph.
    """
    return value * mask


@staged
def multiply_items(values: Any, mask: Mapping[int, Any]) -> Any:
    """Set what is pruned to zero in those items of a list that have a mask."""
    return [value * mask[n] if n in mask else value for n, value in enumerate(values)]


def numpy_mask(weight: Any, axes: list[int], count: int, batch: int = 0) -> Any:
    """Return an array like `weight`: 0 for the `count` smallest magnitudes, 1 for the others.

    Args:
        weight: The weight.
        axes: Its axes in the order in which equal magnitudes are pruned.
        count: How many elements become 0 in each of the arrays along the first `batch` axes.
        batch: How many of the leading axes count separate weights.
    """
    import numpy as np

    array = np.asarray(weight)
    ordered = array.transpose(axes)
    magnitudes = np.abs(ordered).reshape(*ordered.shape[:batch], -1)
    mask = np.ones(magnitudes.shape, array.dtype)
    # A sort of all of them takes ten times as long as finding the largest that is pruned.
    last = np.partition(magnitudes, count - 1, axis=-1)[..., count - 1, None] if count else 0
    if np.isnan(last).any():
        smallest = np.argsort(magnitudes, axis=-1, kind="stable")[..., :count]
        np.put_along_axis(mask, smallest, 0, axis=-1)
    else:
        less, equal = magnitudes < last, magnitudes == last
        left = count - np.count_nonzero(less, axis=-1, keepdims=True)
        mask[less | (equal & (np.cumsum(equal, axis=-1) <= left))] = 0
    return mask.reshape(ordered.shape).transpose(np.argsort(axes))


def torch_mask(weight: Any, axes: list[int], count: int, batch: int = 0) -> Any:
    """Return the mask as a tensor with the memory layout of `weight`.

    Args:
        weight: The weight.
        axes: Its axes in the order in which equal magnitudes are pruned.
        count: How many elements become 0 in each of the tensors along the first `batch` axes.
        batch: How many of the leading axes count separate weights.
    """
    import torch

    with torch.no_grad():
        ordered = weight.detach().permute(axes)
        magnitudes = ordered.abs().flatten(batch)
        mask = torch.ones_like(magnitudes, dtype=weight.dtype)
        # As in `numpy_mask`.
        is_plain = count and type(magnitudes) is torch.Tensor
        last = magnitudes.kthvalue(count, dim=-1, keepdim=True).values if is_plain else None
        if last is None or last.isnan().any():
            smallest = magnitudes.argsort(stable=True, dim=-1)[..., :count]
            # Not by an index: a distributed tensor cannot be indexed by another kind of tensor.
            mask = mask.scatter(-1, smallest, 0)
        else:
            less, equal = magnitudes < last, magnitudes == last
            left = count - less.sum(-1, keepdim=True)
            mask.masked_fill_(less | (equal & (equal.cumsum(-1) <= left)), 0)
        back = sorted(range(len(axes)), key=axes.__getitem__)
        mask = mask.reshape(ordered.shape).permute(back)
        return torch.empty_like(weight.detach()).copy_(mask)


@staged
def torch_multiply(value: Any, mask: Any) -> Any:
    """Set what is pruned to zero in a weight or gradient, whose dtype may have changed since the
    mask was made.
    """
    return value * (mask if mask.dtype == value.dtype else mask.to(value.dtype))


def torch_masked(value: Any, mask: Any) -> Any:
    """Return a weight with its pruned elements set to zero, without a gradient. It may be kept."""
    import torch

    if mask.dtype != value.dtype:
        mask = mask.to(value.dtype)
    if not torch.is_inference_mode_enabled():
        return value.detach() * mask
    # Writes to inference tensors are not counted, so none of them may be kept.
    with torch.inference_mode(False), torch.no_grad():
        return value * mask


def torch_part(whole: Any, weight: Weight) -> Any:
    """Return the part of `whole` that `weight` is of its parameter; `whole` has its layout."""
    memory, seen = weight.memory, weight.seen
    if memory is None or seen is None:
        return whole
    if (memory.offset, memory.shape, memory.strides) == (seen.offset, seen.shape, seen.strides):
        return whole
    offset = whole.storage_offset() + seen.offset - memory.offset
    return whole.as_strided(seen.shape, seen.strides, offset)


def array_part(whole: Any, weight: Weight) -> Any:
    """Return the part of `whole` that `weight` shows of its parameter, in the axes of the input."""
    left = [axis for axis in weight.axes if axis is not None]
    region = [*weight.region, *[slice(None)] * (whole.ndim - len(weight.region))]
    # Nothing tells the axis of one element.
    picked = [i if isinstance(i, int) or n in left else 0 for n, i in enumerate(region)]
    found = whole[tuple(picked)].transpose([sorted(left).index(axis) for axis in left])
    return found[tuple(None if axis is None else slice(None) for axis in weight.axes)]


def torch_keeps() -> bool:
    """Return True if what is computed now may be kept for further executions."""
    import torch

    return not torch.is_grad_enabled()
