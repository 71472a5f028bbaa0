"""Execution of the insertions of a plan on arrays, on or off MXNet's tape."""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import nullcontext
from typing import Any

from mxnet import autograd
from mxnet.ndarray import NDArray

from amanda_core.driver_kit import Plan, inside_routine
from amanda_core.interface import UnsupportedError
from amanda_driver_mxnet.mxnet_internals.arrays import needs_gradient, new_array, record

__all__ = ["fold"]


def fold(plan: Plan, values: Sequence[Any], states: Container[int] = ()) -> list[Any]:
    """Execute a plan's insertions one by one, since each may be differentiated or not.

    Args:
        plan: The plan of a forward point.
        values: The values of the op at this point.
        states: Positions of arrays that the op changes in place, beside its results.
    """
    new = list(values)
    for step in plan:
        autodiff = step.action.autodiff
        with nullcontext() if autodiff else autograd.pause(autograd.is_training()):
            changes = step(new)
        for place, value in changes:
            if place in states:
                raise UnsupportedError(
                    "A state that MXNet's operator changes in place cannot be edited",
                    where=step.where,
                    fix="Only observe it, or select the other inputs by `inputs=[...]`",
                )
            new[place] = value if autodiff else _edited(new[place], value)
    return new


def _edited(old: Any, new: Any) -> Any:
    """Return `new`, with its gradient passed straight to `old`."""
    with inside_routine():  # The driver's own operators.
        if not isinstance(new, NDArray):
            new = new_array(new, old)
        # MXNet's operators refuse arrays of several dtypes.
        new = new.detach() if new.dtype == old.dtype else new.astype(old.dtype)
        if autograd.is_recording() and needs_gradient(old):
            record([old], [new], lambda gradients: gradients)
        return new
