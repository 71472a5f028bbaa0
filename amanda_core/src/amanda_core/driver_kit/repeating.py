"""`Repeater`: how a driver executes recorded operators again, apart from a program.

Owns the methods and their defaults. A driver sets an instance as the attribute ``repeater`` of its
facts; without it, `amanda replay` says that operators of this framework cannot be executed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from amanda_core.interface.facts import NotReadableError

__all__ = ["Repeater"]


class Repeater:
    """Executes recorded operators again, from values by the names of their positions.

    Each method raises `NotReadableError` for what the framework does not have, such as a device of
    another machine; the message says what, in a few words.
    """

    def empty(self, shape: Sequence[int], dtype: str, device: str) -> Any:
        """Return a tensor of this dtype, which is named as by `Facts.dtype`, without values.

        Args:
            shape: Its shape.
            dtype: Its dtype.
            device: Where it is, named as by `Facts.device`; empty for main memory.
        """
        raise NotReadableError("its driver does not make tensors")

    def form(self, tensor: Any) -> Sequence[int] | None:
        """Return what beside the values of a tensor decides which kernel computes with it.

        Such as how its elements lie in memory. None if it is like a new tensor.
        """
        return None

    def formed(self, tensor: Any, form: Sequence[int]) -> Any:
        """Return a tensor with the same values of which `form` returns the same."""
        raise NotReadableError("the layout of an input")

    def constant(self, text: str) -> Any:
        """Return the constant of which `Facts.constant` returns this text."""
        raise NotReadableError(f"the constant {text}")

    def execute(self, op_type: str, arguments: Mapping[str, Any]) -> Sequence[Any]:
        """Execute an operator and return its outputs, without gradients.

        Args:
            op_type: Its type, as `OpContext.op_type` is.
            arguments: The values at its positions and its attributes, by their names.
        """
        raise NotReadableError(f"the operator {op_type}")
