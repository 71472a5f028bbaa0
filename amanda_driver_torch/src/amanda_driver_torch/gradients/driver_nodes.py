"""The nodes that the driver inserts into autograd graphs, and what operators save for theirs.

Owns the node of an edit that needs one, the tap on gradients, the operator with a replaced
backward, and copies of what operators save. These nodes are not shown as operators. They run before
any node of the user, so that sums of gradients keep their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd import Function

from amanda_driver_torch.gradients.function_apply import apply_unseen
from amanda_driver_torch.threads.modes import call_with_saved_hooks
from amanda_driver_torch.threads.state import call_quietly
from amanda_driver_torch.torch_internals.internals import (
    DisableTorchFunction,
    backward_class,
    may_hook_saved_tensors,
    saved_by,
    set_sequence_number,
    top_saved_tensor_hooks,
)
from amanda_driver_torch.torch_internals.tensor_attributes import memory_of, node_of

__all__ = [
    "DRIVER_NODES",
    "call_keeping_saved",
    "copy_saved",
    "insert_edit",
    "insert_transformed",
    "run_replaced",
    "tap",
]

R = TypeVar("R")

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


class AmandaTransformedEdit(Function):
    """Replaces `old` by `new` inside transforms of `torch.func`; it runs once for each level."""

    generate_vmap_rule = True

    @staticmethod
    def forward(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return new.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0].clone()


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


def insert_edit(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return `new` as the output of a node that passes its gradient to `old`."""
    edited: torch.Tensor = apply_unseen(AmandaEdit, old, new)
    _prioritise(edited)
    return edited


def insert_transformed(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return `new` inside transforms of `torch.func`, with the gradients and tangents of `old`."""
    edited: torch.Tensor = call_quietly(AmandaTransformedEdit.apply, old, new)
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


def call_keeping_saved(
    memory: set[int], function: Callable[..., R], *args: Any
) -> tuple[R, list[bool] | None]:
    """Call `function` and save copies of the tensors in `memory` that it saves for backward.

    An in-place op saves the storage that it writes. Editing its result there would change what its
    backward formula reads. Hooks around this call (checkpointing) still see every tensor.

    Returns:
        Its result, and for each tensor that was saved whether it was copied; None if that is not
        known.
    """
    if not (memory and may_hook_saved_tensors()):
        return function(*args), None
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

    return call_with_saved_hooks(pack, unpack, function, *args), copied


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
