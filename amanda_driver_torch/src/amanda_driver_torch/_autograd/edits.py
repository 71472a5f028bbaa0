"""Edits: which values and gradients a routine may return, and how they enter the autograd graph.

Owns the checks, whose errors name tool, routine and op, and the choice of the straight-through
form. `execute`, `taps` and `backward` decide where an edited value goes.
"""

from __future__ import annotations

from typing import Any

import torch

from amanda_core import Step
from amanda_core.errors import EditError, UnsupportedError
from amanda_driver_torch._autograd.driver_nodes import pass_straight
from amanda_driver_torch._torch.tensor_attributes import (
    is_nested_strided,
    repeats_memory,
    requires_grad,
    shape_of,
)

__all__ = [
    "check_gradient",
    "check_gradient_shape",
    "check_tensor",
    "check_written",
    "edited",
    "edited_gradient",
    "refuse_nested",
]


def edited(old: Any, new: Any, step: Step, *, node: bool) -> Any:
    """Return the replacement of `old`: `new`, passed straight through unless autodiff was
    requested.

    Args:
        old: A value of an op.
        new: What a routine returned for it.
        step: The routine's step.
        node: Whether outputs of the op may be its inputs or views of them; see `pass_straight`.
    """
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        if len(old) != len(new):
            raise EditError(
                f"A list of {len(new)} values cannot replace one of {len(old)}",
                where=step.where,
                fix="Return as many values as the list has",
            )
        items = [
            o if n is o else edited(o, n, step, node=node) for o, n in zip(old, new, strict=True)
        ]
        return tuple(items) if isinstance(old, tuple) else items
    if not isinstance(old, torch.Tensor):
        return new
    if step.action.autodiff:
        return new
    if not isinstance(new, torch.Tensor):
        if requires_grad(old):
            check_tensor(old, new, step)
        return new
    if torch.is_grad_enabled() and requires_grad(old):
        check_tensor(old, new, step)
        refuse_nested(old, step)
    return pass_straight(old, new, node=node)


def check_tensor(old: torch.Tensor, new: Any, step: Step) -> None:
    """Raise `EditError` unless `new` can replace `old`.

    Otherwise a straight-through edit of another shape would fail much later, in the backward pass.
    """
    if not isinstance(new, torch.Tensor):
        raise EditError(
            f"A {type(new).__name__} cannot replace a tensor here",
            where=step.where,
            fix="Return a tensor",
        )
    if shape_of(new) != shape_of(old):
        raise EditError(
            f"A value of shape {tuple(shape_of(new))} cannot replace one of {tuple(shape_of(old))}",
            where=step.where,
            fix="Keep the shape. replace_op, or an insertion under amanda.autodiff_enabled(), may "
            "change it unless the op works in place",
        )


def check_written(old: torch.Tensor, new: Any, step: Step, same_dtype: bool = True) -> None:
    """Raise `EditError` unless `new` can be written into `old`.

    Args:
        old: A tensor that an op writes.
        new: What a routine returned for it.
        step: The routine's step.
        same_dtype: Whether the dtype must be the same.
    """
    check_tensor(old, new, step)
    if same_dtype and new.dtype != old.dtype:
        raise EditError(
            f"A value of {new.dtype} cannot be written into a tensor of {old.dtype}",
            where=step.where,
            fix="Keep the dtype",
        )
    if repeats_memory(old):
        raise EditError(
            "Elements of the tensor share memory, so others cannot be written into it",
            where=step.where,
            fix="Edit the tensor before it is expanded",
        )


def refuse_nested(old: torch.Tensor, step: Step) -> None:
    """Raise `UnsupportedError` if `old` is a nested tensor of the strided layout."""
    if is_nested_strided(old):
        raise UnsupportedError(
            "Neither nested tensors of the strided layout that require gradients nor their "
            "gradients can be edited, since PyTorch's functions and hooks do not accept them",
            where=step.where,
            fix="Make them with layout=torch.jagged",
        )


def edited_gradient(old: Any, new: Any, step: Step) -> Any:
    """Return the replacement of the gradient `old`.

    If the backward pass is itself differentiated, gradients of gradients pass straight through.

    Raises:
        EditError: `new` cannot replace it.
    """
    check_gradient(old, new, step)
    if new is None or step.action.autodiff or not torch.is_grad_enabled():
        return new
    return pass_straight(old, new, node=False)


def check_gradient(old: Any, new: Any, step: Step) -> None:
    """Raise `EditError` unless `new` can replace the gradient `old`."""
    if new is None or old is None:
        if old is None and new is not None:
            raise EditError(
                "There is no gradient here that could be edited",
                where=step.where,
                fix="Return None",
            )
        return
    check_gradient_shape(new, shape_of(old), step)
    if new is not old and isinstance(old, torch.Tensor):
        refuse_nested(old, step)


def check_gradient_shape(new: Any, shape: torch.Size, step: Step) -> None:
    """Raise `EditError` unless `new` is None or a tensor of `shape`."""
    if new is None:
        return
    if not isinstance(new, torch.Tensor):
        raise EditError(
            f"A {type(new).__name__} cannot replace a gradient",
            where=step.where,
            fix="Return a tensor",
        )
    if shape_of(new) != shape:
        raise EditError(
            f"A gradient of shape {tuple(shape_of(new))} cannot replace one of {tuple(shape)}",
            where=step.where,
            fix="Return a gradient of the same shape",
        )
