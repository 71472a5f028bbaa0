"""Shapes of any framework's tensors.

Owns what a shape is to a tool. Imports no framework: of a tensor it reads `shape`.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["Size", "size_of"]


class Size(tuple[int, ...]):
    """The shape of one tensor.

    Attributes:
        stored: Elements that are stored, of a sparse tensor; else None.
    """

    stored: int | None = None

    @property
    def elements(self) -> int:
        """How many elements a dense tensor of this shape has."""
        return math.prod(self)


def size_of(value: Any) -> Any:
    """The `Size` of a tensor, a tuple of them for a list; None where there is no tensor.

    Raises:
        ValueError: A tensor whose shape is not known, or not known yet.
    """
    if isinstance(value, (list, tuple)) and not hasattr(value, "dtype"):
        return tuple(size_of(item) for item in value)
    if not hasattr(value, "dtype"):
        return None
    try:
        size = Size(int(length) for length in value.shape)
    except Exception as error:  # Frameworks raise what they like where a shape is not known.
        raise ValueError("a shape is not known") from error
    if getattr(value, "is_sparse", False) is True:
        size.stored = int(value._nnz())
    elif "sparse" in str(getattr(value, "layout", "")):
        size.stored = int(value.values().shape.numel())
    return size
