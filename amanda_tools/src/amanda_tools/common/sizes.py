"""Shapes and types of any framework's tensors.

Owns what a shape is to a tool. Imports no framework: of a tensor it reads `shape` and `dtype`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Position",
    "Size",
    "TensorType",
    "described",
    "dtype_name",
    "has_storage",
    "is_dense",
    "is_tensor",
    "is_wrapper",
    "position_of",
    "size_of",
    "text_of",
    "type_of",
]


@dataclass(frozen=True, slots=True)
class TensorType:
    """What is known of a tensor before its values are.

    Attributes:
        dtype: Type of its elements, such as ``float32``.
        shape: Its dimensions, None for one that is not known; None if not even their number is.

    >>> str(TensorType("float32", (8, None)))
    'float32[8,?]'
    """

    dtype: str
    shape: tuple[int | None, ...] | None

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype}[...]"
        return f"{self.dtype}[{','.join('?' if n is None else str(n) for n in self.shape)}]"


#: What stands at a position: a tensor, a list of them, or None for what is no tensor.
Position = TensorType | list[TensorType | None] | None


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


def dtype_name(tensor: Any) -> str:
    """Name of a tensor's dtype without that of the framework, such as ``float32``."""
    dtype = getattr(tensor, "dtype", None)
    return getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]


def is_tensor(value: Any) -> bool:
    """Return True if a value is a tensor of some framework."""
    try:
        return hasattr(value, "dtype") and hasattr(value, "shape")
    except RuntimeError:
        return True  # PyTorch's nested tensors have no shape, and say so by this error.


def has_storage(tensor: Any) -> bool:
    """Return True if a tensor of PyTorch's has a storage of its own.

    A batch of gradients (`is_grads_batched`, vectorised Jacobians) and other wrappers have none,
    and numbers that are computed of them cannot be read.
    """
    import torch

    return bool(torch._C._has_storage(tensor))


def is_wrapper(value: Any) -> bool:
    """Return True if a tensor of PyTorch's keeps its values in other tensors.

    Its class then answers each operator itself, and nothing but the class can read the values.
    """
    for kind in type(value).__mro__:
        if "__torch_dispatch__" in vars(kind):
            # PyTorch's own base class has the attribute, too; it stands for no answer.
            return kind.__name__ != "Tensor"
    return False


def is_dense(value: Any) -> bool:
    """Return True if a tensor has one shape, and a number at each place.

    None that is sparse, nested, quantized, without data or made of other tensors has.
    """
    if is_wrapper(value) or (hasattr(value, "detach") and not has_storage(value)):
        return False
    if any(
        getattr(value, name, False) is True for name in ("is_nested", "is_quantized", "is_meta")
    ):
        return False
    return "strided" in str(getattr(value, "layout", "strided"))


def type_of(value: Any) -> TensorType | None:
    """Type and shape of a tensor, None for what is none."""
    if not is_tensor(value) or value.dtype is None:
        return None
    try:
        sizes = tuple(map(_length, value.shape))
    except (RuntimeError, TypeError, ValueError):
        sizes = None  # Not even the number of dimensions is known, or there is none.
    return TensorType(dtype_name(value), sizes)


def _length(size: Any) -> int | None:
    try:
        return None if size is None else int(size)
    except AttributeError:
        return None  # PyTorch's jagged tensors have lengths that differ, and no number for them.


def position_of(value: Any) -> Position:
    """The tensor types at a position."""
    if isinstance(value, (list, tuple)):
        types = [type_of(item) for item in value]
        return types if any(types) else None
    return type_of(value)


def text_of(position: Position) -> str:
    """The tensor types at a position, for people; empty where there is no tensor.

    >>> text_of([TensorType("int8", ()), TensorType("int8", (2,))])
    '(int8[] int8[2])'
    """
    if isinstance(position, list):
        return f"({' '.join(map(str, position))})"
    return "" if position is None else str(position)


def described(values: Sequence[Any] | None) -> list[str | None]:
    """Dtype and shape of each value, such as ``float32[8,3]``; None for what is no tensor.

    A dimension that is not known yet is ``?``, and a list of tensors is in parentheses.
    """
    return [text_of(position_of(value)) or None for value in values or ()]
