"""The changes of `steer`: arithmetic with tensors where they are, which a graph may contain."""

from __future__ import annotations

from typing import Any, Literal

from amanda_core.engine.action import staged
from amanda_core.interface.facts import Facts
from amanda_tools.kit.tensors.arithmetic import arithmetic_of

__all__ = ["Edit", "steered"]

Edit = Literal["add", "scale", "replace", "project", "ablate"]


@staged
def steered(value: Any, *, facts: Facts, edit: Edit, factor: float, vector: Any, mask: Any) -> Any:
    """Return a value with its chosen part changed.

    Args:
        value: A tensor of floating point numbers.
        facts: The driver's facts about tensors.
        edit: The change.
        factor: The number of `scale`, and the share that `project` takes away.
        vector: What is added, or put in its place; the unit vector for `project`. A tensor of the
            value's dtype.
        mask: Which elements change, a tensor that broadcasts to the value; None for all.
    """
    arithmetic = arithmetic_of(facts, value)
    if edit == "scale":
        new = value * factor
    elif edit == "add":
        new = value + vector
    elif edit == "project":
        new = value - factor * arithmetic.sum(value * vector, -1, keepdims=True) * vector
    else:
        new = arithmetic.zeros_like(value)
        if edit == "replace":  # Of the value's shape, whatever the vector's is.
            new = new + vector
    return new if mask is None else arithmetic.where(mask, new, value)
