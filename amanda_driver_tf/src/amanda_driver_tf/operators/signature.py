"""Positions of an op's inputs, as in TensorFlow's OpDef.

Owns the grouping of flat inputs: an argument that is a list of tensors is one position.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from amanda_driver_tf.tensorflow_internals.modules import op_def_registry

__all__ = ["Signature", "flattened", "grouped", "signature_of"]


class _Argument(NamedTuple):
    name: str
    #: Attribute that gives the argument's number of tensors, or None for a single tensor.
    number: str | None
    #: Whether that attribute is a list of types, whose length is the number.
    types: bool
    is_ref: bool


class Signature(NamedTuple):
    """Inputs of an op type, by position.

    Attributes:
        names: Names of the positions.
        arguments: The layout of each.
    """

    names: tuple[str, ...]
    arguments: tuple[_Argument, ...]

    def lengths(self, get_attr: Callable[[str], Any]) -> tuple[int | None, ...]:
        """Return the number of tensors at each position; None for a single tensor.

        Args:
            get_attr: Returns the value of an attribute: an integer or a sequence of types.
        """
        return tuple(
            None
            if argument.number is None
            else len(get_attr(argument.number))
            if argument.types
            else int(get_attr(argument.number))
            for argument in self.arguments
        )


@functools.cache
def signature_of(op_type: str) -> Signature | None:
    """Return the signature of an op type; None if TensorFlow does not know it (function names)."""
    op_def = op_def_registry.get(op_type)
    if op_def is None:
        return None
    arguments = tuple(
        _Argument(
            argument.name,
            argument.number_attr or argument.type_list_attr or None,
            bool(argument.type_list_attr),
            argument.is_ref,
        )
        for argument in op_def.input_arg
    )
    return Signature(tuple(argument.name for argument in arguments), arguments)


def grouped(flat: Sequence[Any], lengths: Sequence[int | None]) -> list[Any]:
    """Group flat inputs by position."""
    result: list[Any] = []
    start = 0
    for length in lengths:
        if length is None:
            result.append(flat[start])
            start += 1
        else:
            result.append(list(flat[start : start + length]))
            start += length
    return result


def flattened(positions: Sequence[Any], lengths: Sequence[int | None]) -> list[Any]:
    """Flatten grouped inputs, the inverse of `grouped`."""
    result: list[Any] = []
    for value, length in zip(positions, lengths, strict=True):
        if length is None:
            result.append(value)
        else:
            result.extend(value)
    return result
