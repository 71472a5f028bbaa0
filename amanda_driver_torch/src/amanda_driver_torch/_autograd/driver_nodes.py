"""Edited values in autograd graphs, and the nodes that the driver inserts.

Owns the tensor that replaces another in the graph, the identity node for cases where a node is
needed, the tap on gradients, and the operator with a replaced backward. These nodes are not shown
as operators. They run before any node of the user, so that sums of gradients keep their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from amanda_driver_torch._autograd.function_apply import apply_unseen
from amanda_driver_torch._torch.internals import (
    DisableTorchFunction,
    backward_class,
    forward_ad_level,
    make_saved_tensor,
    may_hook_saved_tensors,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    saved_by,
    set_sequence_number,
    top_saved_tensor_hooks,
)
from amanda_driver_torch._torch.tensor_attributes import (
    PLAIN,
    is_differentiable,
    memory_of,
    node_of,
    requires_grad,
)

__all__ = ["DRIVER_NODES", "copy_saved", "keep_saved", "pass_straight", "run_replaced", "tap"]

# The engine runs ready nodes in descending order of sequence numbers. Only AccumulateGrad has a
# higher one (2**64 - 1); those of operators count up from 0.
_TOP = 2**62
_serial = itertools.count(1)


def _prioritise(value: torch.Tensor) -> None:
    node = node_of(value)
    if node is not None:
        set_sequence_number(node, _TOP - next(_serial))


class AmandaEdit(Function):
    """Replaces `old` by `new`; the gradient goes to `old`."""

    @staticmethod
    def forward(ctx: Any, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        # In-place operations would fail on `new` itself and on a view of it.
        return new.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0]


class AmandaTap(Function):
    """Identity of several tensors, whose gradients are passed to a function together."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *values: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.function = function
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, *ctx.function(grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(tangents[1:])


class AmandaReplaced(Function):
    """Runs an operator, with another function as its backward."""

    @staticmethod
    def forward(ctx: Any, run: Any, replacement: Any, *values: torch.Tensor) -> Any:
        ctx.replacement = replacement
        outputs, dirty = run(values)
        if dirty:
            ctx.mark_dirty(*dirty)
        fixed = tuple(o for o in outputs if not (o.is_floating_point() or o.is_complex()))
        if fixed:
            ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, None, *ctx.replacement(grads))


#: The types of these nodes in a graph.
DRIVER_NODES = tuple(map(backward_class, (AmandaEdit, AmandaTap, AmandaReplaced)))


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
        push_saved_tensor_hooks(_nothing, values)
        try:
            saved = make_saved_tensor(old, False)
        finally:
            pop_saved_tensor_hooks()
    value: torch.Tensor = saved.unpack()
    if value.is_leaf:
        # It does not keep alive the node that accumulates the gradients of `old`.
        value._amanda_place = saved  # type: ignore[attr-defined]
    return value


def _nothing(_: torch.Tensor) -> None:
    """Save no values."""


def pass_straight(old: torch.Tensor, new: torch.Tensor, *, node: bool = True) -> torch.Tensor:
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
    edited: torch.Tensor = apply_unseen(AmandaEdit, old, new)
    _prioritise(edited)
    return edited


def tap(
    values: Sequence[torch.Tensor], function: Callable[[Sequence[Any]], Sequence[Any]]
) -> tuple[torch.Tensor, ...]:
    """Return identities of `values`; `function` maps their gradients, or None if there is none."""
    tapped: tuple[torch.Tensor, ...] = apply_unseen(AmandaTap, function, *values)
    _prioritise(tapped[0])
    return tapped


def run_replaced(
    run: Callable[[Sequence[torch.Tensor]], tuple[Sequence[Any], Sequence[Any]]],
    values: Sequence[torch.Tensor],
    replacement: Callable[[Sequence[Any]], Sequence[Any]],
) -> tuple[torch.Tensor, ...]:
    """Run an operator on `values` with `replacement` as its backward, and return its outputs.

    Args:
        run: Runs the operator on the values. Returns its tensors, and those of them that are inputs
            written in place.
        values: The differentiable inputs.
        replacement: Maps gradients of the outputs to one gradient for each of `values`.
    """
    return tuple(apply_unseen(AmandaReplaced, run, replacement, *values))


@contextmanager
def keep_saved(memory: set[int]) -> Iterator[list[bool] | None]:
    """Save copies of the tensors in `memory` that an op saves for backward during this context.

    Yields for each tensor that was saved so far whether it was copied; None if that is not known.

    An in-place op saves the storage that it writes. Editing its result there would change what its
    backward formula reads. Hooks outside of this context (checkpointing) still see every tensor.
    """
    if not (memory and may_hook_saved_tensors()):
        yield None
        return
    copied: list[bool] = []
    around = top_saved_tensor_hooks(True)
    pack_around, unpack_around = around if around is not None else (None, None)

    def pack(tensor: torch.Tensor) -> Any:
        # The user's function modes are active here.
        with DisableTorchFunction():
            copied.append(memory_of(tensor) in memory)
            if copied[-1]:
                tensor = tensor.detach().clone()
        return pack_around(tensor) if pack_around is not None else tensor

    def unpack(saved: Any) -> torch.Tensor:
        return unpack_around(saved) if unpack_around is not None else saved

    with saved_tensors_hooks(pack, unpack):
        yield copied


def copy_saved(nodes: Sequence[Any], memory: set[int]) -> None:
    """Replace the tensors in `memory` that nodes have saved for their backward by copies."""
    for node in nodes:
        for held, tensor in saved_by(node):
            if memory_of(tensor) in memory:
                held.register_hooks(_copied, _as_it_is)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    with DisableTorchFunction():
        return tensor.detach().clone()


def _as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return saved
