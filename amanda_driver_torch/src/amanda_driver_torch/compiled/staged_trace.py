"""Traces of staged routines at the nodes of a graph, which can be compared.

Owns the rule by which two routines do the same with different tensors: they call the same functions
in the same order, with the same other arguments, and pass the results on in the same way.
"""

from __future__ import annotations

from typing import Any

import torch

from amanda_driver_torch.torch_internals.dynamo import tree_map

__all__ = ["StagedTrace"]

#: Types of which values that are written alike are the same.
_PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device}
    | {torch.layout, torch.memory_format}
)


class StagedTrace:
    """The calls of staged routines, with a number for each tensor.

    Attributes:
        form: The calls; equal for routines that compute the same of other tensors.
    """

    def __init__(self) -> None:
        self.form: list[Any] = []
        #: What is compared by its id lives as long.
        self._objects: list[object] = []
        #: id of a tensor -> the tensor, and its number.
        self._tensors: dict[int, tuple[torch.Tensor, int]] = {}

    def note(self, *values: Any) -> None:
        """Note a function and what it is given, or what it returned."""
        self.form.append(tree_map(self._form_of, values))

    def end(self) -> None:
        """Refer to the tensors no longer."""
        self._tensors.clear()

    def _form_of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            number = self._tensors.setdefault(id(value), (value, len(self._tensors)))[1]
            return torch.Tensor, number
        if type(value) is slice:
            return slice, *map(self._form_of, (value.start, value.stop, value.step))
        if type(value) in _PLAIN:
            return type(value), repr(value)  # So NaN is NaN, and -0.0 not 0.0.
        if callable(value):
            return value  # Not by id: method wrappers are new objects at each access, but equal.
        self._objects.append(value)
        return id(value)
