"""Edits: which values and gradients a routine may return, and how they enter the autograd graph.

Owns the checks, whose errors name tool, routine and op, and the choice of the straight-through
form. `execute`, `taps` and `backward` decide where an edited value goes.
"""

from __future__ import annotations

from typing import Any

import torch

from amanda_core.driver_kit import Step
from amanda_core.interface import EditError, UnsupportedError
from amanda_driver_torch.gradients.driver_nodes import insert_edit, insert_transformed
from amanda_driver_torch.threads.modes import call_with_saved_hooks
from amanda_driver_torch.torch_internals.internals import (
    forward_ad_level,
    functorch_active,
    make_saved_tensor,
    top_saved_tensor_hooks,
)
from amanda_driver_torch.torch_internals.tensor_attributes import (
    PLAIN,
    is_differentiable,
    is_nested_strided,
    node_of,
    repeats_memory,
    requires_grad,
    shape_of,
)


def refused(step: Step, what: str, fix: str) -> EditError:
    """Return the error of a routine that returned something unfit."""
    return EditError(what, where=step.where, fix=fix)


def edited(old: Any, new: Any, step: Step, *, node: bool) -> Any:
    """Return the replacement of `old`: `new`, passed straight through unless autodiff was
    requested.

    Args:
        old: A value of an op.
        new: What a routine returned for it.
        step: The routine's step.
        node: Whether outputs of the op may be its inputs or views of them; see `_pass_straight`.
    """
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        if len(old) != len(new):
            raise refused(
                step,
                f"A list of {len(new)} values cannot replace one of {len(old)}",
                "Return as many values as the list has",
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
    return _pass_straight(old, new, node=node)


def _replace_in_graph(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the values of `new` at the place of `old` in the graph.

    When torch unpacks a saved tensor, it takes the values from hooks and the place in the graph
    from the original. So no node is needed, at which sums of gradients would be grouped
    differently.
    """
    assert make_saved_tensor is not None

    def values(_: None) -> torch.Tensor:
        return new

    # If the base of this view was written, reading the view's node updates it.
    node_of(old)
    if top_saved_tensor_hooks(True) is None:
        saved = make_saved_tensor(old, False)
        saved.register_hooks(_nothing, values)
    else:
        # The user's hooks must not be called.
        saved = call_with_saved_hooks(_nothing, values, make_saved_tensor, old, False)
    value: torch.Tensor = saved.unpack()
    if value.is_leaf:
        # It does not keep alive the node that accumulates the gradients of `old`.
        value._amanda_place = saved  # type: ignore[attr-defined]
    return value


def _nothing(_: torch.Tensor) -> None:
    """Save no values."""


def _pass_straight(old: torch.Tensor, new: torch.Tensor, *, node: bool = True) -> torch.Tensor:
    """Return `new` in place of `old`, so that gradients pass straight through.

    Args:
        old: The value.
        new: Its replacement.
        node: Whether it needs a node of its own. If the program may hold both tensors, each has its
            own hooks and its own retained gradient.
    """
    if new.is_inference() and not torch.is_inference_mode_enabled():
        # An inference tensor cannot be saved for backward; a clone outside is an ordinary one.
        new = new.clone()
    if functorch_active():
        return insert_transformed(old, new)
    # In forward-mode differentiation the tangent passes straight through, too.
    differentiated = forward_ad_level() >= 0
    differentiable = new.is_floating_point() or new.is_complex()
    if not differentiated and not (torch.is_grad_enabled() and is_differentiable(old)):
        if requires_grad(old) and differentiable and not node:
            # Torch selects kernels by `requires_grad`, even if no gradients are recorded.
            return new if new.requires_grad else new.detach().requires_grad_()
        return new.detach() if new.requires_grad else new
    plain = type(old) in PLAIN and type(new) in PLAIN
    if not (node or differentiated or make_saved_tensor is None) and plain and differentiable:
        return _replace_in_graph(old, new)
    return insert_edit(old, new)


def check_tensor(old: torch.Tensor, new: Any, step: Step) -> None:
    """Raise `EditError` unless `new` can replace `old`.

    Otherwise a straight-through edit of another shape would fail much later, in the backward pass.
    """
    if not isinstance(new, torch.Tensor):
        raise refused(
            step, f"A {type(new).__name__} cannot replace a tensor here", "Return a tensor"
        )
    if shape_of(new) != shape_of(old):
        raise refused(
            step,
            f"A value of shape {tuple(shape_of(new))} cannot replace one of {tuple(shape_of(old))}",
            "Keep the shape. replace_op, or an insertion under amanda.autodiff_enabled(), may "
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
        raise refused(
            step,
            f"A value of {new.dtype} cannot be written into a tensor of {old.dtype}",
            "Keep the dtype",
        )
    if repeats_memory(old):
        raise refused(
            step,
            "Elements of the tensor share memory, so others cannot be written into it",
            "Edit the tensor before it is expanded",
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
    return _pass_straight(old, new, node=False)


def check_gradient(old: Any, new: Any, step: Step) -> None:
    """Raise `EditError` unless `new` can replace the gradient `old`."""
    if new is None or old is None:
        if old is None and new is not None:
            raise refused(step, "There is no gradient here that could be edited", "Return None")
        return
    check_gradient_shape(new, shape_of(old), step)
    if new is not old and isinstance(old, torch.Tensor):
        refuse_nested(old, step)


def check_gradient_shape(new: Any, shape: torch.Size, step: Step) -> None:
    """Raise `EditError` unless `new` is None or a tensor of `shape`."""
    if new is None:
        return
    if not isinstance(new, torch.Tensor):
        raise refused(step, f"A {type(new).__name__} cannot replace a gradient", "Return a tensor")
    if shape_of(new) != shape:
        raise refused(
            step,
            f"A gradient of shape {tuple(shape_of(new))} cannot replace one of {tuple(shape)}",
            "Return a gradient of the same shape",
        )
