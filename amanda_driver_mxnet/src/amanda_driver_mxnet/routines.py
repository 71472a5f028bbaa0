"""Execution of the insertions of a plan on arrays, on or off MXNet's tape."""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import nullcontext
from typing import Any

from mxnet import autograd
from mxnet.ndarray import NDArray

from amanda_core import Plan, Session, Step
from amanda_core.errors import RoutineResultError, UnsupportedError
from amanda_core.threads import inside_routine
from amanda_driver_mxnet._mxnet_internals import arrays
from amanda_driver_mxnet.custom_nodes import Node, passed

__all__ = ["fold"]


def fold(
    session: Session,
    plan: Plan,
    values: Sequence[Any],
    states: Container[int] = (),
    *,
    fixed: bool = False,
) -> list[Any]:
    """Execute a plan's insertions one by one, since each may be differentiated or not.

    Args:
        session: The session.
        plan: The plan of a forward point.
        values: The values of the op at this point.
        states: Positions of arrays that the op changes in place, beside its results.
        fixed: Whether the values must keep their shapes.
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
            if fixed:
                _check_shape(step, new[place], value)
            new[place] = value if autodiff else _edited(session, new[place], value)
    return new


def _check_shape(step: Step, old: Any, new: Any) -> None:
    """Refuse a value for which a graph has no memory."""
    if tuple(getattr(new, "shape", old.shape)) != tuple(old.shape):
        raise RoutineResultError(
            f"A routine returned a value of shape {tuple(new.shape)} for one of {tuple(old.shape)}",
            where=step.where,
            fix="Keep the shape, or do not hybridize the block",
        )


def _edited(session: Session, old: Any, new: Any) -> Any:
    """Return `new`, with its gradient passed straight to `old`."""
    with inside_routine():  # The driver's own operators.
        if not isinstance(new, NDArray):
            new = arrays.new_array(new, old)
        # MXNet's operators refuse arrays of several dtypes.
        new = new.detach() if new.dtype == old.dtype else new.astype(old.dtype)
        if not autograd.is_recording() or not arrays.needs_gradient(old):
            return new
    node = Node(
        lambda: session,
        2,
        run=lambda values: values[1:],
        backward=lambda gradients: [*gradients, None],
        types=[arrays.dtype_of(new)],
        shapes=lambda shapes: shapes[1:],
    )
    return passed(node, [old, new])[0]
