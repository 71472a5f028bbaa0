"""How torch's wrappers for several processes tell which processes they are, and what they hold."""

from __future__ import annotations

from typing import Any

import torch

from amanda_driver_torch.torch_internals.internals import flat_parameter_of, wraps

__all__ = [
    "COMMUNICATING",
    "COMMUNICATORS",
    "class_of",
    "groups_of",
    "is_low_precision",
    "lets_join",
    "sharded_groups",
    "sharded_of",
]

#: What the dotted names of functions begin with that move parameters between processes.
COMMUNICATING = (
    "torch.distributed.fsdp._flat_param.",
    "torch.distributed.fsdp._fully_shard.",
    "torch.distributed.fsdp._runtime_utils.",
    "torch.distributed.utils.",
    "torch.nn.parallel.distributed.",
)
#: Methods of a process group that write tensors of this process.
COMMUNICATORS = (
    *("_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_to_all_single"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce"),
    *("allreduce_coalesced", "all_gather_single_coalesced", "alltoall", "alltoall_base"),
    *("broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "scatter"),
)


def sharded_groups(module: torch.nn.Module) -> list[Any]:
    """Return the groups of parameters that `fully_shard` has made of a module."""
    if not any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
        return []
    state = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    return list([state._fsdp_param_group] if groups is None else groups)


def class_of(module: torch.nn.Module) -> str:
    """Return the name of a module's class, before `fully_shard` or `replicate` changed it."""
    kind = type(module)
    first, *others = kind.__bases__
    changed = others and first.__module__.startswith("torch.distributed.")
    return (others[0] if changed else kind).__qualname__


def groups_of(module: torch.nn.Module) -> list[Any]:
    """Return the process groups over which a module's gradients are reduced, one after another."""
    if wraps(module) and (group := getattr(module, "process_group", None)) is not None:
        across = getattr(module, "_inter_node_pg", None)
        return [group] if across is None else [group, across]
    for one in sharded_groups(module):
        names = "shard_process_group", "replicate_process_group"
        found = [getattr(one.mesh_info, name, None) for name in names]
        return [group for group in found if group is not None]
    return []


def lets_join(module: torch.nn.Module) -> bool:
    """Return True if processes may end early now: `Join` in DistributedDataParallel."""
    config = getattr(module, "_join_config", None)
    return config is not None and bool(config.enable)


def sharded_of(group: Any, parameter: Any) -> Any:
    """Return the part of a parameter that `fully_shard` keeps, from the whole; None if it is none.

    Args:
        group: One of `sharded_groups`.
        parameter: What operators read.
    """
    for one in group.fsdp_params:
        if getattr(one, "_unsharded_param", None) is parameter:
            return one.sharded_param
    return None


def is_low_precision(parameter: torch.Tensor) -> bool:
    """Return True for a view of a copy that FSDP1 makes in another dtype."""
    flat = flat_parameter_of(parameter)
    return getattr(flat, "_mp_shard", None) is not None
