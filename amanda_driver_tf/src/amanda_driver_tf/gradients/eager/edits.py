"""Edits: which values and gradients a routine may return, and how tapes see them.

Owns the checks, whose errors name tool, routine and op, and the straight-through form: an identity
on the tapes that passes the gradient to the original value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda_core.driver_kit import Step
from amanda_core.interface import EditError, UnsupportedError
from amanda_driver_tf.tensorflow_internals.modules import (
    dtypes,
    gen_array_ops,
    indexed_slices,
    ops,
    record,
)
from amanda_driver_tf.tensorflow_internals.tapes import call_unrecorded, is_recorded, no_tape
from amanda_driver_tf.threads import call_quietly

__all__ = [
    "call_step",
    "check_gradient",
    "edited",
    "edited_gradient",
    "is_trainable",
    "pass_straight",
    "records",
    "tensor_of",
]


# The types that gradients flow through, by their enum values.
_TRAINABLE = frozenset(
    kind.as_datatype_enum
    for kind in (
        dtypes.float16,
        dtypes.float32,
        dtypes.float64,
        dtypes.complex64,
        dtypes.complex128,
        dtypes.resource,
        dtypes.variant,
        dtypes.bfloat16,
    )
)


def is_trainable(tensor: Any) -> bool:
    """Return True if gradients flow through values of this kind."""
    return tensor.dtype.as_datatype_enum in _TRAINABLE


def call_step(step: Step, values: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return the changes of a step, whose routine runs on the tapes if it requested autodiff."""
    return step(values) if step.action.autodiff else call_unrecorded(step, values)


def records(value: Any) -> bool:
    """Return True if a tape of this thread records operations on a tensor."""
    return bool(not no_tape() and is_recorded([value]))


def _straight(*grads: Any) -> list[Any]:
    return list(grads)


def pass_straight(old: Any, new: Any) -> Any:
    """Return `new`, with its gradient passed to `old` as if nothing had happened between them."""
    if no_tape() or old.dtype == dtypes.resource:
        return new
    # A new tensor, since the tapes may track `new` already.
    fresh = call_quietly(call_unrecorded, gen_array_ops.identity, new)
    record.record_operation("AmandaEdit", [fresh], [old], _straight, _straight)
    return fresh


def tensor_of(old: Any, new: Any, step: Step) -> Any:
    """Convert `new` to a tensor of the type of `old`.

    Raises:
        EditError: It cannot be converted.
    """
    if isinstance(new, ops.EagerTensor):
        if new.dtype != old.dtype:
            raise EditError(
                f"A value of {new.dtype.name} cannot replace one of {old.dtype.name}",
                where=step.where,
                fix="Keep the dtype",
            )
        return new
    try:
        run = (ops.convert_to_tensor, new, old.dtype)
        new = call_quietly(*run) if step.action.autodiff else call_quietly(call_unrecorded, *run)
    except (TypeError, ValueError) as error:
        raise EditError(
            f"A {type(new).__name__} cannot replace a tensor of {old.dtype.name}: {error}",
            where=step.where,
            fix="Return a tensor",
        ) from None
    if not isinstance(new, ops.EagerTensor):
        raise EditError(
            "A symbolic tensor cannot replace a value",
            where=step.where,
            fix="Return a tensor that has a value",
        )
    return new


def edited(old: Any, new: Any, step: Step) -> Any:
    """Return the replacement of `old`: `new`, passed straight through unless autodiff was
    requested.
    """
    if isinstance(old, list):
        if not isinstance(new, (list, tuple)) or len(new) != len(old):
            raise EditError(
                f"{'A list of ' + str(len(new)) if isinstance(new, (list, tuple)) else 'One'} "
                f"cannot replace a list of {len(old)} tensors",
                where=step.where,
                fix="Return as many tensors as the list has",
            )
        return [o if n is o else edited(o, n, step) for o, n in zip(old, new, strict=True)]
    new = tensor_of(old, new, step)
    if step.action.autodiff or new is old:
        return new
    if new.shape != old.shape and records(old):
        raise EditError(
            f"A value of shape {tuple(new.shape)} cannot replace one of {tuple(old.shape)}",
            where=step.where,
            fix="Keep the shape. replace_op, or an insertion under amanda.autodiff_enabled(), may "
            "change it",
        )
    return pass_straight(old, new)


# Gradients.


def check_gradient(new: Any, shape: Any, where: str) -> None:
    """Raise `EditError` unless `new` is None or can be a gradient of a value of `shape`."""
    if new is None or isinstance(new, indexed_slices.IndexedSlices):
        return
    if not isinstance(new, ops.EagerTensor):
        raise EditError(
            f"A {type(new).__name__} cannot replace a gradient",
            where=where,
            fix="Return a tensor",
        )
    if shape is not None and not new.shape.is_compatible_with(shape):
        raise EditError(
            f"A gradient of shape {tuple(new.shape)} cannot replace one of {tuple(shape)}",
            where=where,
            fix="Return a gradient of the same shape",
        )


def edited_gradient(old: Any, new: Any, step: Step) -> Any:
    """Return the replacement of the gradient `old`.

    If the backward pass is itself recorded, gradients of gradients pass straight through.

    Raises:
        EditError: `new` cannot replace it.
    """
    if old is None and new is not None:
        raise EditError(
            "There is no gradient here that could be edited", where=step.where, fix="Return None"
        )
    if isinstance(old, list):
        if not isinstance(new, (list, tuple)) or len(new) != len(old):
            raise EditError(
                f"A routine must return a list of {len(old)} gradients here",
                where=step.where,
                fix="Return one gradient for each tensor of the list",
            )
        return [o if n is o else edited_gradient(o, n, step) for o, n in zip(old, new, strict=True)]
    if new is None or new is old:
        return new
    if isinstance(old, indexed_slices.IndexedSlices):
        return _edited_slices(old, new, step)
    if not isinstance(new, indexed_slices.IndexedSlices):
        new = tensor_of(old, new, step)
    check_gradient(new, old.shape, step.where)
    if step.action.autodiff:
        return new
    if isinstance(new, indexed_slices.IndexedSlices):
        _refuse_if_recorded(old, step)
        return new
    return pass_straight(old, new)


def _edited_slices(old: Any, new: Any, step: Step) -> Any:
    if not isinstance(new, indexed_slices.IndexedSlices):
        new = tensor_of(old.values, new, step)
        check_gradient(new, old.shape, step.where)
        if not step.action.autodiff:
            _refuse_if_recorded(old.values, step)
        return new
    if step.action.autodiff or new.values is old.values:
        return new
    if new.values.shape != old.values.shape:
        _refuse_if_recorded(old.values, step)
        return new
    values = pass_straight(old.values, new.values)
    return indexed_slices.IndexedSlices(values, new.indices, new.dense_shape)


def _refuse_if_recorded(old: Any, step: Step) -> None:
    if records(old):
        raise UnsupportedError(
            "A sparse gradient was replaced by one of another form, and is itself differentiated",
            where=step.where,
            fix="Return slices of the same form, or insert under amanda.autodiff_enabled()",
        )
