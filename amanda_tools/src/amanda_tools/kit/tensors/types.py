"""Shapes and dtypes of tensors, as their driver reports them.

What counts as a tensor is decided by the driver's `Facts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from amanda_core.interface.facts import Facts

__all__ = [
    "Position",
    "Size",
    "TensorType",
    "describe_tensors",
    "dtype_of",
    "is_floating",
    "is_real",
    "position_of",
    "size_of",
    "sizes_at",
    "text_of",
    "type_of",
]


@dataclass(frozen=True, slots=True)
class TensorType:
    """Dtype and shape of a tensor, which are known before its values.

    Attributes:
        dtype: Type of the elements, such as ``float32``.
        shape: The dimensions. An unknown dimension is None; the whole shape is None if the rank is
            unknown.

    >>> str(TensorType("float32", (8, None)))
    'float32[8,?]'
    """

    dtype: str
    shape: tuple[int | None, ...] | None

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype}[...]"
        return f"{self.dtype}[{','.join('?' if n is None else str(n) for n in self.shape)}]"


#: Value at one position of an operator: a tensor, a list of tensors, or None if neither.
Position = TensorType | list[TensorType | None] | None


class Size(tuple[int, ...]):
    """Shape of one tensor.

    Attributes:
        stored: Number of stored elements of a sparse tensor; None for a dense one.
    """

    stored: int | None = None

    @property
    def elements(self) -> int:
        """Return the number of elements of a dense tensor of this shape."""
        return math.prod(self)


def size_of(facts: Facts, value: Any) -> Any:
    """Return the `Size` of a tensor, a tuple of sizes for a list, or None for anything else.

    Raises:
        ValueError: The shape of a tensor is not fully known.

    >>> from amanda_tools.kit.tensors.values import UNKNOWN
    >>> size_of(UNKNOWN, [1.5, None])  # Without a driver, nothing is a tensor.
    (None, None)
    """
    if facts.is_tensor(value):
        shape = facts.shape(value)
        if shape is None or None in shape:
            raise ValueError("a shape is not known")
        size = Size(shape)  # type: ignore[arg-type]  # None is not in it.
        stored = facts.stored(value)
        if stored is not None:
            size.stored = stored
        return size
    if isinstance(value, (list, tuple)):
        return tuple(size_of(facts, item) for item in value)
    return None


def sizes_at(
    facts: Facts, values: Sequence[Any] | None, positions: Sequence[int]
) -> tuple[Any, ...] | None:
    """Return the sizes at some positions, or None if one of them is not known."""
    try:
        return tuple(size_of(facts, (values or ())[position]) for position in positions)
    except (IndexError, ValueError):
        return None


def dtype_of(facts: Facts, value: Any) -> str:
    """Return the dtype of a tensor, or an empty string if the value is not a tensor."""
    return facts.dtype(value) if facts.is_tensor(value) else ""


def is_real(facts: Facts, value: Any) -> bool:
    """Return True for a tensor of real floating-point numbers, or a list that contains one.

    Ask in routines, too: an op may get a number or another type than when it was analysed.

    >>> from amanda_tools.kit.tensors.values import UNKNOWN
    >>> is_real(UNKNOWN, [1.5])  # Without a driver, nothing is a tensor.
    False
    """
    if isinstance(value, (list, tuple)):
        return any(is_real(facts, item) for item in value)
    return "float" in dtype_of(facts, value)


def is_floating(facts: Facts, value: Any) -> bool:
    """Return True for a floating-point or complex tensor, or a list that contains one.

    >>> from amanda_tools.kit.tensors.values import UNKNOWN
    >>> is_floating(UNKNOWN, 1.5)  # Without a driver, nothing is a tensor.
    False
    """
    if isinstance(value, (list, tuple)):
        return any(is_floating(facts, item) for item in value)
    dtype = dtype_of(facts, value)
    return "float" in dtype or "complex" in dtype


def type_of(facts: Facts, value: Any) -> TensorType | None:
    """Return the type and shape of a tensor, or None if the value is not a tensor.

    In an analysis routine::

        type_of(facts_of(context), context.get_inputs()[0])  # TensorType("float32", (8, 3))
    """
    return TensorType(facts.dtype(value), facts.shape(value)) if facts.is_tensor(value) else None


def position_of(facts: Facts, value: Any) -> Position:
    """Return the types of the tensors at a position."""
    if isinstance(value, (list, tuple)):
        types = [type_of(facts, item) for item in value]
        return types if any(types) else None
    return type_of(facts, value)


def text_of(position: Position) -> str:
    """Format the tensor types at a position; return an empty string if there is no tensor.

    >>> text_of([TensorType("int8", ()), TensorType("int8", (2,))])
    '(int8[] int8[2])'
    """
    if isinstance(position, list):
        return f"({' '.join(map(str, position))})"
    return "" if position is None else str(position)


def describe_tensors(facts: Facts, values: Sequence[Any] | None) -> list[str | None]:
    """Return dtype and shape of each value, such as ``float32[8,3]``, or None if it is not a
    tensor.

    An unknown dimension is ``?``, and a list of tensors is in parentheses.

    >>> from amanda_tools.kit.tensors.values import UNKNOWN
    >>> describe_tensors(UNKNOWN, [1.5])  # Without a driver, nothing is a tensor.
    [None]
    """
    return [text_of(position_of(facts, value)) or None for value in values or ()]
