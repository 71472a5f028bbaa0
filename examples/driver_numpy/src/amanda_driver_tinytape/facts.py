"""Facts about tinytape's tensors: shapes, values, memory.

Tools never inspect a value themselves. These few lines make profilers and pruning tools work on
tinytape.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from amanda_core.interface import Facts, Storage
from tinytape import Array, Tensor

__all__ = ["TapeFacts"]


class TapeFacts(Facts):
    """Facts about tensors, which are float64 arrays; gradients are bare arrays."""

    def is_tensor(self, value: Any) -> bool:
        """Return True for tensors and gradients."""
        return isinstance(value, (Tensor, np.ndarray))

    def dtype(self, tensor: Tensor | Array) -> str:
        """Return the name of the dtype."""
        return _array(tensor).dtype.name

    def shape(self, tensor: Tensor | Array) -> tuple[int, ...]:
        """Return the shape."""
        return _array(tensor).shape

    def nbytes(self, tensor: Tensor | Array) -> int:
        """Return the size of the elements in bytes."""
        return _array(tensor).nbytes

    def storage(self, tensor: Tensor | Array) -> Storage | None:
        """Return the memory of the array; a view has the memory of its base."""
        array = _array(tensor)
        while isinstance(array.base, np.ndarray):
            array = array.base
        return Storage(array.ctypes.data, array.nbytes, array) if array.nbytes else None

    def tensor(self, values: Any, like: Tensor | Array) -> Tensor | Array:
        """Return a tensor, or an array beside a gradient."""
        return Tensor(values) if isinstance(like, Tensor) else np.asarray(values)

    def values(self, tensor: Tensor | Array) -> Array:
        """Return a copy of the array."""
        return _array(tensor).copy()


def _array(tensor: Tensor | Array) -> Array:
    return tensor.data if isinstance(tensor, Tensor) else tensor
