"""Edits of what an operator writes: they must stay in the storage of the original.

Owns how arguments are written before the op and results after it, without invalidating what ops
have saved for their backward.
"""

from __future__ import annotations

from typing import Any

import torch

from amanda_core.driver_kit import Step
from amanda_core.interface import UnsupportedError
from amanda_driver_torch.gradients.driver_nodes import copy_saved
from amanda_driver_torch.gradients.edits import check_written
from amanda_driver_torch.gradients.nodes import new_nodes, tensors_in
from amanda_driver_torch.gradients.operator_call import OperatorCall
from amanda_driver_torch.operators.bindings import IN_PLACE_METADATA
from amanda_driver_torch.threads.modes import call_with_gradients
from amanda_driver_torch.torch_internals.internals import is_grad_enabled
from amanda_driver_torch.torch_internals.tensor_attributes import (
    is_weight,
    memory_of,
    requires_grad,
)

__all__ = ["edit_result", "write_argument", "written_memory"]


def written_memory(call: OperatorCall) -> set[int]:
    """Return the storages of the inputs that an op may write, as the numbers of `memory_of`.

    Those of ``out=`` are not among them. Empty if the op writes no input, or only inputs whose
    memory is not known: sparse tensors, and those of subclasses.
    """
    memory = {memory_of(t) for t in tensors_in(call.values[p] for p in call.mutated)}
    return {number for number in memory if number is not None}


def write_argument(old: Any, new: Any, step: Step) -> None:
    """Edit an argument that the op writes, before the op, by writing into its memory.

    Args:
        old: The tensor, or a list or tuple of tensors.
        new: The new values, of the same structure. A tensor that is the old one stays unchanged.
        step: The step that edits, for the gradient and for messages.
    """
    if isinstance(old, (list, tuple)):
        for one, other in zip(old, new, strict=True):
            if other is not one:
                write_argument(one, other, step)
        return
    check_written(old, new, step)
    if step.action.autodiff and is_grad_enabled():
        old.copy_(new)
        return
    # The tensor version must not change: the edit invalidates no saved tensor that the op itself
    # would not invalidate.
    _overwrite(old, new)


def edit_result(call: OperatorCall, old: torch.Tensor, new: Any, step: Step) -> bool:
    """Write an edited result into the output itself if the program needs this very tensor.

    So it is if the op wrote `old` in place or as ``out=``, or made it as a leaf.

    Returns:
        True if it was written; False if the program can get `new` instead.

    Raises:
        EditError: `new` does not fit into `old`.
        UnsupportedError: `old` cannot be written, because the op changes its shape, or may have
            saved its memory for backward.
    """
    first = call.values[0] if call.bound.signature.in_place else None
    if any(old is one for one in tensors_in([call.bound.out, first])):
        _rewrite(call, old, new, step)
        return True
    given = tensors_in(call.bound.values)
    if not (step.action.autodiff or any(old is one for one in given)) and is_weight(old):
        # The op made a leaf, as ``torch.randn(3, requires_grad=True)`` does. The program will read
        # the gradient from this very leaf.
        check_written(old, new, step)
        _overwrite(old, new)
        return True
    return False


def _rewrite(call: OperatorCall, old: torch.Tensor, new: Any, step: Step) -> None:
    """Write an edited result to the tensor that the op wrote."""
    if call.operator.op_type in IN_PLACE_METADATA:
        raise UnsupportedError(
            f"The result of {call.operator.op_type} cannot be edited: the op changes the shape "
            "of its own input",
            where=step.where,
            fix="Edit the input of the op that uses it",
        )
    check_written(old, new, step)
    if call.called and is_grad_enabled():
        copy_saved(new_nodes(call.made([old]), call.start)[0], written_memory(call))
    if step.action.autodiff and is_grad_enabled():
        old.copy_(new)
    elif is_grad_enabled() and requires_grad(old) and memory_of(old) is None:
        raise UnsupportedError(
            f"The result of {call.operator.op_type} cannot be edited: the operator may have "
            "saved the memory that it writes for its backward, and whether it did is not known "
            "for tensors of this layout or type",
            where=step.where,
            fix="Edit the input of the op that uses it",
        )
    else:
        # The graph stays valid: the op's saved tensors are no longer in this storage, and others'
        # saved tensors in it are outdated since the op wrote it.
        _overwrite(old, new)


def _overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a tensor without autograd noticing."""
    if memory_of(tensor) is not None:
        tensor.data.copy_(values)
        return
    # The `data` of a sparse tensor does not share the memory that must be written.
    call_with_gradients(False, tensor.copy_, values)
