"""Nodes of the autograd graph that are traced into compiled graphs: edits and taps of gradients."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import Function

from amanda_driver_torch.gradients.driver_nodes import AmandaTap
from amanda_driver_torch.torch_internals.internals import is_view

__all__ = ["pass_straight", "recorded", "replaced_backward", "tapped"]

Gradients = Callable[[list[Any]], Sequence[Any]]


class _Straight(Function):
    """The new value, with the gradient of the old one."""

    @staticmethod
    def forward(ctx: Any, old: Any, new: Callable[[], Any]) -> Any:
        return new()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def pass_straight(old: torch.Tensor, new: torch.Tensor, is_alone: bool) -> torch.Tensor:
    """Return `new` as a value whose gradient flows to `old`.

    Args:
        old: The value that is edited.
        new: The new value.
        is_alone: Whether nothing else refers to `new`, so that it may become part of the graph.
    """
    if not (torch.is_grad_enabled() and old.requires_grad):
        return new
    # In-place operations would fail on a view in the graph.
    is_alone = is_alone and not new.requires_grad and not is_view(new)
    found: torch.Tensor = _Straight.apply(old, (lambda: new) if is_alone else new.detach)
    return found


def tapped(change: Gradients, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the same values; `change` gets their gradients, and returns them changed."""
    found: Sequence[torch.Tensor] = AmandaTap.apply(change, *tensors)
    return found


class _Replaced(Function):
    """A computation with another backward."""

    @staticmethod
    def forward(ctx: Any, compute: Any, backward: Gradients, *tensors: Any) -> Any:
        ctx.backward_of = backward
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in compute(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (None, None, *ctx.backward_of(list(gradients)))


def replaced_backward(
    compute: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    backward: Gradients,
    tensors: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor]:
    """Return the results of `compute`, differentiated by `backward`."""
    found: Sequence[torch.Tensor] = _Replaced.apply(compute, backward, *tensors)
    return found


class _Recorded(Function):
    """A computation that leaves its autograd graph at its last result."""

    @staticmethod
    def forward(ctx: Any, record: Any, derive: Any, wanted: Any, *tensors: Any) -> Any:
        *results, graph = record(tensors)
        ctx.save_for_backward(graph)
        ctx.derive, ctx.wanted, ctx.count = derive, wanted, len(tensors)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found: list[Any] = [None] * ctx.count
        derived = ctx.derive([*ctx.saved_tensors, *gradients])
        for place, gradient in zip(ctx.wanted, derived, strict=True):
            found[place] = gradient
        return (None, None, None, *found)


def recorded(
    record: Gradients, derive: Gradients, wanted: Sequence[int], tensors: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Return the results of `record`, differentiated by `derive`.

    Args:
        record: Returns the results, and behind them a tensor for `derive`.
        derive: Gets that tensor and the gradients of the results; returns those of the tensors.
        wanted: The numbers of the tensors that get gradients.
        tensors: The tensors.
    """
    found: Sequence[torch.Tensor] = _Recorded.apply(record, derive, wanted, *tensors)
    return found
