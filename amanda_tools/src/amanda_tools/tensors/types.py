"""Shapes and types of tensors, as their driver tells them.

Owns what a shape is to a tool. What a value is, the `Facts` of its driver say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from amanda_core.facts import Facts

__all__ = [
    "Position",
    "Size",
    "TensorType",
    "described",
    "dtype_of",
    "is_floating",
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


def size_of(facts: Facts, value: Any) -> Any:
    """Return the `Size` of a tensor, a tuple of them for a list, None where there is no tensor.

    Raises:
        ValueError: A tensor whose shape is not known, or not known yet.
    """
    if facts.is_tensor(value):
        shape = facts.shape(value)
        if shape is None or None in shape:
            raise ValueError("a shape is not known")
        size = Size(shape)  # type: ignore[arg-type]  # None is not in it.
        size.stored = facts.stored(value)
        return size
    if isinstance(value, (list, tuple)):
        return tuple(size_of(facts, item) for item in value)
    return None


def dtype_of(facts: Facts, value: Any) -> str:
    """Return the dtype of a tensor, an empty string for what is no tensor."""
    return facts.dtype(value) if facts.is_tensor(value) else ""


def is_floating(facts: Facts, value: Any) -> bool:
    """Return True for a tensor of floating-point numbers, complex ones too, or a list with one."""
    if isinstance(value, (list, tuple)):
        return any(is_floating(facts, item) for item in value)
    dtype = dtype_of(facts, value)
    return "float" in dtype or "complex" in dtype


def type_of(facts: Facts, value: Any) -> TensorType | None:
    """Return the type and shape of a tensor, None for what is no tensor."""
    return TensorType(facts.dtype(value), facts.shape(value)) if facts.is_tensor(value) else None


def position_of(facts: Facts, value: Any) -> Position:
    """Return the tensor types at a position."""
    if isinstance(value, (list, tuple)):
        types = [type_of(facts, item) for item in value]
        return types if any(types) else None
    return type_of(facts, value)


def text_of(position: Position) -> str:
    """The tensor types at a position, for people; empty where there is no tensor.

    >>> text_of([TensorType("int8", ()), TensorType("int8", (2,))])
    '(int8[] int8[2])'
    """
    if isinstance(position, list):
        return f"({' '.join(map(str, position))})"
    return "" if position is None else str(position)


def described(facts: Facts, values: Sequence[Any] | None) -> list[str | None]:
    """Return dtype and shape of each value, such as ``float32[8,3]``; None for what is no tensor.

    A dimension that is not known yet is ``?``, and a list of tensors is in parentheses.
    """
    return [text_of(position_of(facts, value)) or None for value in values or ()]
