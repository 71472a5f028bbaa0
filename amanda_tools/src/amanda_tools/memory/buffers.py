"""Which memory a tensor stands on: PyTorch's storages and TensorFlow's buffers.

Owns how each framework's memory is told apart. Imports the frameworks late.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = [
    "CUDA_BLOCK",
    "Buffer",
    "Unknown",
    "kept",
    "sequence",
    "size_in_bytes",
    "storages",
    "views",
]

#: What the allocator of PyTorch for CUDA rounds up to, in bytes.
CUDA_BLOCK = 512


class Unknown(Exception):
    """The memory of a tensor cannot be told."""


class Buffer(NamedTuple):
    """A piece of memory.

    Attributes:
        key: What tells it from others that live.
        size: In bytes, as it is allocated.
        holder: The object with which it dies, or, of several holders, the last.
    """

    key: object
    size: int
    holder: Any


def storages(value: Any) -> Iterator[Buffer]:
    """The storages of a tensor of PyTorch, or of those in a list.

    Raises:
        Unknown: It has none that can be seen.
    """
    import torch

    for tensor in _tensors(value, torch.Tensor):
        if tensor.device.type == "meta":
            continue
        try:
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (NotImplementedError, RuntimeError) as error:
            raise Unknown(f"{type(tensor).__name__}, {tensor.layout}: no storage") from error
        if size:
            if tensor.device.type == "cuda":
                size = -size // CUDA_BLOCK * -CUDA_BLOCK
            yield Buffer((str(tensor.device), address), size, storage)


def views(value: Any) -> Iterator[Buffer]:
    """The buffers of an eager tensor of TensorFlow, or of those in a list.

    Several tensors may stand on one buffer, which has an address on the CPU alone, and of common
    dtypes alone; elsewhere each tensor counts by itself.
    """
    from tensorflow.python.framework.ops import EagerTensor

    for tensor in _tensors(value, EagerTensor):
        size = size_in_bytes(tensor)
        if not size:
            continue
        key: object = id(tensor)
        if tensor.device.rpartition("/")[2].startswith("device:CPU"):
            # Python's buffers do not have all dtypes.
            with contextlib.suppress(ValueError):
                key = _address(tensor)
        yield Buffer(key, size, tensor)


def sequence() -> int:
    """The number that the next node of PyTorch's autograd will have."""
    import torch

    found: int = torch._C._autograd._get_sequence_nr()
    return found


def size_in_bytes(tensor: Any) -> int:
    """Bytes of a tensor of TensorFlow, 0 where its elements have no size."""
    return math.prod(int(length) for length in tensor.shape) * int(tensor.dtype.size or 0)


def kept(outputs: Any, start: int) -> list[Any]:
    """Return what autograd of PyTorch keeps for the backward of an operator that has just run.

    That of hooks, as those of a checkpoint are, is not asked for: they would compute it.

    Args:
        outputs: What the operator gave.
        start: `sequence` before it ran.
    """
    import torch

    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return []
    found: list[Any] = []
    nodes = [_node(tensor) for tensor in _tensors(outputs, torch.Tensor)]
    seen: set[Any] = {None}
    while nodes:
        node = nodes.pop()
        if node in seen or node.name().endswith("AccumulateGrad") or node._sequence_nr() < start:
            continue
        seen.add(node)
        nodes += (following for following, _ in node.next_functions)
        for name in dir(type(node)):
            if name.startswith("_saved_") or name == "saved_tensors":
                try:
                    found.append(getattr(node, name))
                except RuntimeError:
                    continue  # Written since, or freed: nothing that autograd still keeps.
    return found


def _node(tensor: Any) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None  # A view that was made and written without gradients: it has no node to ask.


def _tensors(value: Any, kind: type) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, kind)


def _address(tensor: Any) -> int:
    import numpy as np

    found: int = np.asarray(memoryview(tensor)).ctypes.data
    return found
