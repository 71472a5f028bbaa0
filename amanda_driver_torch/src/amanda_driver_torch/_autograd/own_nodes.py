"""Edited values in autograd graphs, and the nodes that the driver itself puts there.

Owns the stand-in that carries an edited value in the place of another, the identity that does so
where a node is needed, the tap on gradients, and the operator whose backward is replaced. The nodes
are invisible as operators and pass gradients at once, before any node of the user's, so that sums
of gradients keep their order.
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
    set_sequence_number,
    top_saved_tensor_hooks,
)
from amanda_driver_torch._torch.reading import (
    PLAIN,
    is_differentiable,
    memory_of,
    node_of,
    requires_grad,
)

__all__ = ["OWN_NODES", "keep_saved", "pass_straight", "run_replaced", "tap"]

# The engine runs ready nodes from the highest sequence number down. Above it there is only
# AccumulateGrad at 2**64 - 1; operators count up from 0.
_TOP = 2**62
_serial = itertools.count(1)


def _prioritise(value: torch.Tensor) -> None:
    node = node_of(value)
    if node is not None:
        set_sequence_number(node, _TOP - next(_serial))


class AmandaEdit(Function):
    """`new` in the place of `old`; the gradient goes to `old`."""

    @staticmethod
    def forward(ctx: Any, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        # Neither `new` itself nor a view of it: in-place operations on the result would fail.
        return new.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tangents[0]


class AmandaTap(Function):
    """Identity on several tensors whose gradients are handed to a function together."""

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
    """An operator that runs as it is, and another function instead of its backward."""

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


#: Types of these nodes as they appear in a graph.
OWN_NODES = tuple(map(backward_class, (AmandaEdit, AmandaTap, AmandaReplaced)))


def _stand_in(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A tensor with the values of `new` that has the place of `old` in the graph.

    What torch saves for backward is put together anew from the values and the place in the graph,
    and hooks may supply the values. So there is no node at which sums of gradients would be grouped
    otherwise than without the edit.
    """
    assert make_saved_tensor is not None

    def values(_: None) -> torch.Tensor:
        return new

    # The base of a view may have been written: the place is found again when it is looked at.
    node_of(old)
    if top_saved_tensor_hooks(True) is None:
        saved = make_saved_tensor(old, False)
        saved.register_hooks(_nothing, values)
    else:
        # The user's hooks are not to hear of it.
        push_saved_tensor_hooks(_nothing, values)
        try:
            saved = make_saved_tensor(old, False)
        finally:
            pop_saved_tensor_hooks()
    value: torch.Tensor = saved.unpack()
    if value.is_leaf:
        # It refers to where the gradients of `old` are accumulated, but does not hold it.
        value._amanda_place = saved  # type: ignore[attr-defined]
    return value


def _nothing(_: torch.Tensor) -> None:
    """Save no values."""


def pass_straight(old: torch.Tensor, new: torch.Tensor, *, node: bool = True) -> torch.Tensor:
    """`new` as an autograd-neutral edit of `old`.

    Args:
        old: The value.
        new: What stands for it from now on.
        node: Whether it must have a node of its own: where the program may come to hold both, each
            has its own hooks and retains its own gradient.
    """
    if new.is_inference() and not torch.is_inference_mode_enabled():
        # An inference tensor cannot be saved for backward; a clone outside is an ordinary one.
        new = new.clone()
    # In forward-mode differentiation the tangent passes, too, whatever requires a gradient.
    differentiated = forward_ad_level() >= 0
    differentiable = new.is_floating_point() or new.is_complex()
    if not differentiated and not (torch.is_grad_enabled() and is_differentiable(old)):
        if requires_grad(old) and differentiable and not node:
            # Torch chooses kernels by this, also where there are no gradients.
            return new if new.requires_grad else new.detach().requires_grad_()
        return new.detach() if new.requires_grad else new
    plain = type(old) in PLAIN and type(new) in PLAIN
    if not (node or differentiated or make_saved_tensor is None) and plain and differentiable:
        return _stand_in(old, new)
    edited: torch.Tensor = apply_unseen(AmandaEdit, old, new)
    _prioritise(edited)
    return edited


def tap(
    values: Sequence[torch.Tensor], function: Callable[[Sequence[Any]], Sequence[Any]]
) -> tuple[torch.Tensor, ...]:
    """Identities of `values`; `function` maps their gradients, None where there is none."""
    tapped: tuple[torch.Tensor, ...] = apply_unseen(AmandaTap, function, *values)
    _prioritise(tapped[0])
    return tapped


def run_replaced(
    run: Callable[[Sequence[torch.Tensor]], tuple[Sequence[Any], Sequence[Any]]],
    values: Sequence[torch.Tensor],
    replacement: Callable[[Sequence[Any]], Sequence[Any]],
) -> tuple[torch.Tensor, ...]:
    """Outputs of an operator on `values` whose backward is `replacement`.

    Args:
        run: Runs the operator on the values; returns its tensors and those of them that are
            inputs written in place.
        values: The differentiable inputs.
        replacement: Maps gradients of the outputs to one gradient for each of `values`.
    """
    return tuple(apply_unseen(AmandaReplaced, run, replacement, *values))


@contextmanager
def keep_saved(memory: set[int]) -> Iterator[None]:
    """Extent in which what an op saves for backward in `memory` is saved as a copy.

    An in-place op saves the storage that it writes; editing its result there would change what its
    backward formula sees. Hooks around this extent (checkpointing) still get to see every tensor.
    """
    if not (memory and may_hook_saved_tensors()):
        yield
        return
    around = top_saved_tensor_hooks(True)
    pack_around, unpack_around = around if around is not None else (None, None)

    def pack(tensor: torch.Tensor) -> Any:
        # The user's function modes are in force here.
        with DisableTorchFunction():
            if memory_of(tensor) in memory:
                tensor = tensor.detach().clone()
        return pack_around(tensor) if pack_around is not None else tensor

    def unpack(saved: Any) -> torch.Tensor:
        return unpack_around(saved) if unpack_around is not None else saved

    with saved_tensors_hooks(pack, unpack):
        yield
