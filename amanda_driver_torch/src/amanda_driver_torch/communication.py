"""Context keys of operators that communicate: the processes, and the bytes.

Owns the keys of functional collectives and of redistributions of distributed tensors, and the wait
for what functional collectives have only begun to write.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from amanda_core.driver_kit import Step
from amanda_driver_torch.gradients.nodes import tensors_in
from amanda_driver_torch.groups import processes
from amanda_driver_torch.placements import local
from amanda_driver_torch.torch_internals.distributed import process_group, ranks_of, written
from amanda_driver_torch.vocabulary import COMMUNICATING

__all__ = ["bytes_of", "complete", "describe_communication", "is_unfinished"]


#: Attributes of the tensors that wait themselves when they are read.
_WAITING = ("trigger_wait", "to_local")


def bytes_of(values: Iterable[Any]) -> int:
    """Return how many bytes the tensors have among values, and in lists of them."""
    return sum(one.numel() * one.element_size() for one in tensors_in(values))


def is_unfinished(op: Any, steps: Iterable[Step]) -> bool:
    """Return True if routines get values that an operator may not have written when it returns.

    Args:
        op: The operator, or its type.
        steps: The steps with the routines.
    """
    return str(op).startswith(COMMUNICATING[0]) and any(s.action.positions != () for s in steps)


def complete(value: Any) -> Any:
    """Wait for functional collectives that write a tensor or a list of them; return it."""
    if isinstance(value, (list, tuple)):
        return [complete(one) for one in value]
    if not isinstance(value, torch.Tensor) or any(hasattr(value, name) for name in _WAITING):
        return value
    return written(value)


def describe_communication(context: Any) -> None:
    """Set the keys of a collective, of a redistribution of a distributed tensor, or of the gradient
    of a parameter, which may be reduced.
    """
    if (size := processes()) > 1:
        context["rank"], context["world_size"] = torch.distributed.get_rank(), size
    if context.is_backward():
        return
    if context.op_type == "Redistribute":
        _describe_redistribution(context)
        return
    given = dict(zip(context.input_names, context.get_inputs() or (), strict=False))
    group = given.get("group_name", context.attrs.get("group_name"))
    if isinstance(group, str):
        group = process_group(group)
    if group is not None:
        context["group"] = ranks_of(group)
        copies = given.get("group_size", 1) if context["type"] == "all_gather" else 1
        context["bytes"] = bytes_of(given.values()) * copies


def _describe_redistribution(context: Any) -> None:
    tensor, mesh, placements = context.get_inputs()[:3]
    changed = [
        (axis, _kind_of_change(old, new))
        for axis, (old, new) in enumerate(zip(tensor.placements, placements, strict=True))
        if old != new and mesh.size(axis) > 1
    ]
    kinds = {kind for _, kind in changed}
    context["type"] = next(iter(kinds)) if len(kinds) == 1 else None if kinds else "identity"
    if kinds - {"slice", None}:
        size = bytes_of([local(tensor)])
        for axis, kind in changed:
            size *= mesh.size(axis) if kind == "all_gather" else 1
        context["bytes"] = size
        only = mesh.get_group(changed[0][0]) if len(changed) == 1 else None
        every = (int(rank) for rank in mesh.mesh.flatten().tolist())
        context["group"] = tuple(every) if only is None else ranks_of(only)


def _kind_of_change(old: Any, new: Any) -> str | None:
    if old.is_partial():
        return {(True, False): "all_reduce", (False, True): "reduce_scatter"}.get(
            (new.is_replicate(), new.is_shard())
        )
    if old.is_replicate():
        return "slice" if new.is_shard() else None
    return "all_gather" if new.is_replicate() else "all_to_all" if new.is_shard() else None
