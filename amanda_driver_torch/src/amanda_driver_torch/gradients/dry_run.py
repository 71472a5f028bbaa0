"""Predicts before an op runs whether the gradients of its inputs can be read at its nodes.

Owns the dry run of composite ops on meta tensors, which shows the nodes that they make. The
alternative, an identity before an input, always works, but it would regroup sums of second-order
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from amanda_driver_torch.gradients.gradient_nodes import group_nodes
from amanda_driver_torch.gradients.nodes import differentiable, edge_of, new_nodes, tensors_in
from amanda_driver_torch.gradients.operator_call import OperatorCall
from amanda_driver_torch.operators.signature import outputs_of
from amanda_driver_torch.threads.modes import call_hidden, call_with_saved_hooks
from amanda_driver_torch.threads.state import BEFORE_BACKWARD, BEFORE_FORWARD
from amanda_driver_torch.torch_internals.internals import (
    autocast_enabled,
    next_sequence,
    tree_map_only,
)
from amanda_driver_torch.torch_internals.tensor_attributes import is_strided, requires_grad

__all__ = ["readable"]


#: Parts of the names of composite ops that run other ops on another device or with other libraries,
#: or that draw random numbers.
_OTHERWISE = (
    *("attention", "batch_norm", "ctc_loss", "dropout", "gru", "instance_norm"),
    *("linear_cross_entropy", "lstm", "rms_norm", "rnn", "rrelu"),
)
#: Key of a call -> the result of its dry run.
_found: dict[Any, bool] = {}
_MANY = 1024


def readable(call: OperatorCall, groups: Sequence[frozenset[int]]) -> bool:
    """Return True if for each of `groups` one node computes the gradients of these inputs.

    Args:
        call: The call, before the op runs.
        groups: Positions whose gradients are requested together.
    """
    if (
        call.context.plan(BEFORE_FORWARD).replacement is not None
        or call.context.plan(BEFORE_BACKWARD).replacement is not None
        # Autocast would convert values by further nodes.
        or autocast_enabled()
        or not all(map(is_strided, tensors_in(call.values)))
    ):
        return False
    if call.bound.signature.one_node:
        return True
    if (
        not groups
        or call.operator.aliases
        or call.mutated
        or call.bound.out is not None
        or not call.bound.bound
        or _runs_others(call.operator.op_type)
    ):
        return False
    key = _key(call, groups)
    if key is None:
        return False
    found = _found.get(key)
    if found is None:
        if len(_found) >= _MANY:
            _found.clear()
        found = _found[key] = _dry_run(call, groups)
    return found


@cache
def _runs_others(op_type: str) -> bool:
    return any(part in op_type for part in _OTHERWISE)


def _key(call: OperatorCall, groups: Sequence[frozenset[int]]) -> Any:
    """Return the cache key of a call, which determines the nodes that the op makes; None if
    unknown.
    """
    numbers: dict[int, int] = {}
    owners = _owners(call)

    def described(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            number = numbers.setdefault(owners.get(id(value), 0), len(numbers))
            facts = (value.shape, value.stride(), value.dtype, requires_grad(value))
            return (number, value.device.type, *facts)
        if isinstance(value, (list, tuple)):
            return tuple(map(described, value))
        return (type(value), value)

    values = [*call.values, *call.bound.attrs.items()]
    key = (call.operator.func, frozenset(groups), *map(described, values))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _owners(call: OperatorCall) -> dict[int, int]:
    """Return for each tensor that an op runs on the one that gets its gradient, both by id: an
    edited tensor passes it to the one that it replaces.
    """
    pairs = zip(tensors_in(call.values), tensors_in(call.bound.values), strict=False)
    return {id(new): id(old) for new, old in pairs}


def _dry_run(call: OperatorCall, groups: Sequence[frozenset[int]]) -> bool:
    made: dict[Any, torch.Tensor] = {}
    owners = _owners(call)

    def without_memory(tensor: torch.Tensor) -> torch.Tensor:
        key = (owners.get(id(tensor), 0), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in made:
            meta = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
            made[key] = meta.requires_grad_(tensor.requires_grad)
        return made[key]

    def run() -> bool:
        values = tree_map_only(torch.Tensor, without_memory, call.values)
        args, kwargs = call.bound.call_args(values)
        start = next_sequence()
        try:
            outputs = outputs_of(call.operator.func(*args, **kwargs))
        except Exception:
            return False  # If the call is wrong, the op itself will raise.
        nodes, _ = new_nodes(tensors_in(outputs), start)
        edges = {slot: edge_of(tensor) for slot, tensor in differentiable(values).items()}
        return all(
            gradient_node is not None for _, _, gradient_node in group_nodes(nodes, edges, groups)
        )

    known: bool = call_hidden((), call_with_saved_hooks, _as_it_is, _as_it_is, run)
    return known


def _as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return saved
