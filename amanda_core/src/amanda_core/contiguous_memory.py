"""Where tensors lie that have no gaps, for frameworks that have no strides.

Drivers import it; the engine does not.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from amanda_core.weights.geometry import Memory

__all__ = ["contiguous"]


def contiguous(key: Hashable, address: int, shape: tuple[int, ...], size: int) -> Memory:
    """Return where the elements of a tensor lie that has no gaps.

    Args:
        key: Identifies the memory.
        address: That of the first byte, which is a multiple of the size of an element.
        shape: Its dimensions, none of which is 0.
        size: Its bytes.
    """
    itemsize = size // math.prod(shape)
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Memory(key, address // itemsize, shape, strides, itemsize)
