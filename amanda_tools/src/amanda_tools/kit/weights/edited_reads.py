"""`EditedReads`: what edits of the inputs of operators make of the parameters that they read.

Owns how an edit of a part of a parameter, as an operator sees it, is applied to the parameter, and
which parameters have no values that give every operator what it reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from amanda_core import OpContext
from amanda_core.interface.facts import Facts
from amanda_core.weights.reads import Weight
from amanda_tools.kit.tensors.arithmetic import arithmetic_of
from amanda_tools.kit.tensors.values import facts_of, host
from amanda_tools.kit.weights.baking import Edit
from amanda_tools.kit.weights.coverage import UnreachedWeight

__all__ = ["EditedReads"]


class _Read(NamedTuple):
    """One read of a weight by an operator; `find` is None if the weight is read as it is."""

    op: str
    weight: Weight
    facts: Facts
    find: Callable[[], Edit | None] | None
    key: object


class EditedReads:
    """Records which operators read each parameter, and which of them read it edited.

    >>> EditedReads().read_otherwise()
    []
    """

    def __init__(self) -> None:
        self._reads: dict[str, dict[object, _Read]] = {}

    def add(
        self,
        context: OpContext,
        position: int | None = None,
        find: Callable[[], Edit | None] | None = None,
        key: object = None,
    ) -> None:
        """Record the weights that an operator reads.

        Args:
            context: The operator.
            position: The input that is edited; None if none is.
            find: Returns the edit of this input at present, or None if there is none.
            key: Edits of the same key are the same.
        """
        reads = context.weights
        if not reads.consumed or context.zone == "optimizer":
            return
        for place, weight in reads.items():
            one = find if place == position else None
            read = _Read(context.name, weight, facts_of(context), one, key)
            self._reads.setdefault(weight.owner, {})[context.get_op_id(), place] = read

    def edit_of(self, weight: Weight) -> Edit | None:
        """Return the function to be written into a whole parameter, or None if it is not edited."""
        for read in self._reads.get(weight.owner, {}).values():
            edit = None if read.find is None else read.find()
            if edit is not None:
                return _of_whole(read, edit)
        return None

    def read_otherwise(self) -> list[UnreachedWeight]:
        """Return the edited parameters that no values can replace, with the reasons."""
        found = []
        for reads in self._reads.values():
            edited = [read for read in reads.values() if read.find is not None and read.find()]
            if not edited:
                continue
            first = edited[0]
            why = next(filter(None, map(_why_not, edited)), "")
            others = [read for read in reads.values() if read not in edited]
            if others:
                why = why or f"also read by {others[0].op}, where it is not changed"
            for other in edited[1:]:
                if _kind(other) != _kind(first):
                    why = why or f"changed differently for {first.op} and {other.op}"
            if why:
                size = math.prod(first.weight.shape)
                found.append(UnreachedWeight(first.weight.name, size, why))
        return found


def _kind(read: _Read) -> tuple[object, ...]:
    return read.key, read.weight.key, read.weight.axes


def _axes(weight: Weight) -> list[int]:
    """Return the axes of the parameter that its part has."""
    inner = [isinstance(index, int) for index in weight.region]
    inner += [False] * (len(weight.shape) - len(inner))
    return [axis for axis, inside in enumerate(inner) if not inside]


def _why_not(read: _Read) -> str:
    """Return why an edit cannot be applied to the parameter, or an empty string."""
    weight = read.weight
    if weight.varies:
        return f"{read.op} reads other parameters in other executions"
    axes = [axis for axis in weight.axes if axis is not None]
    if not weight.exact or len(axes) != len(weight.axes) or sorted(axes) != _axes(weight):
        return f"read by {read.op} in another shape"
    return ""


def _of_whole(read: _Read, edit: Edit) -> Edit:
    """Return the edit of a whole parameter that edits the part which an operator reads."""
    weight, facts = read.weight, read.facts
    left = _axes(weight)
    order = [left.index(axis) for axis in weight.axes if axis is not None]

    def edited(values: Any) -> Any:
        seen = values[weight.region] if weight.region else values
        if order != sorted(order):
            seen = arithmetic_of(facts, values).permute_dims(seen, order)
        new = host(facts, edit(seen)).array
        array = host(facts, values).array
        array[weight.region] = new.transpose([order.index(axis) for axis in range(len(order))])
        return facts.restore(array, values)

    return edited
