"""How torch's wrappers for several processes tell which processes they are, and what they hold.

All names without an underscore are offered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch

from amanda_core.driver_kit import local_of
from amanda_driver_torch.torch_internals.modules import flat_parameter_of, names_in, wraps

#: What the dotted names of functions begin with that move parameters between processes.
COMMUNICATING = (
    "torch.distributed.fsdp._flat_param.",
    "torch.distributed.fsdp._fully_shard.",
    "torch.distributed.fsdp._runtime_utils.",
    "torch.distributed.utils.",
    "torch.nn.parallel.distributed.",
)


class Communicator(NamedTuple):
    """A method of a process group that communicates.

    Attributes:
        function: The function of `torch.distributed` that calls it.
        given: The argument that other processes get, counted from 0; None if there is none.
        written: The argument that it writes.
    """

    function: str
    given: int | None
    written: int | None


#: Argument that is given, argument that is written -> methods, each with the function that calls it
#: under another name. Releases have different ones.
_METHODS = {
    (0, 0): "allreduce:all_reduce allreduce_coalesced:all_reduce_coalesced broadcast reduce",
    (1, 0): "allgather:all_gather allgather_coalesced:all_gather_coalesced "
    "_allgather_base:all_gather_into_tensor all_gather_single:all_gather_into_tensor "
    "allgather_into_tensor_coalesced:all_gather_into_tensor_coalesced "
    "all_gather_single_coalesced:all_gather_into_tensor_coalesced gather scatter reduce_scatter "
    "_reduce_scatter_base:reduce_scatter_tensor reduce_scatter_single:reduce_scatter_tensor "
    "reduce_scatter_tensor_coalesced "
    "reduce_scatter_single_coalesced:reduce_scatter_tensor_coalesced "
    "alltoall:all_to_all alltoall_base:all_to_all_single all_to_all_single",
    (0, None): "send",
    (None, 0): "recv recv_anysource:recv",
    (None, None): "barrier monitored_barrier",
}
#: Method of a process group -> what it does.
COMMUNICATORS: Mapping[str, Communicator] = {
    method: Communicator(function or method, *places)
    for places, methods in _METHODS.items()
    for method, _, function in (one.partition(":") for one in methods.split())
}


#: The function of `torch.distributed` by which modules send parameters and buffers.
BROADCAST = "_broadcast_coalesced"
#: The method of a reducer that reduces all buckets and waits for them.
DELAYED = "_delay_all_reduce"
#: Keys of the dispatcher below those of autograd; None if they have no name.
_BELOW_AUTOGRAD: Any = getattr(torch._C, "_after_autograd_keyset", None)


def kernel_of_reductions(call: Callable[..., Any]) -> Any:
    """Put a function before the kernel of what reducers call; return what keeps it there.

    Args:
        call: Is given what goes on, and the arguments.

    Returns:
        None if PyTorch does not let us.
    """
    if _BELOW_AUTOGRAD is None:
        return None

    def kernel(keys: Any, *args: Any) -> Any:
        operator = torch.ops.c10d.allreduce_.default
        return call(functools.partial(operator.redispatch, keys & _BELOW_AUTOGRAD), *args)

    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("allreduce_", kernel, "Autograd", with_keyset=True)
    return library


def hooks_of(module: torch.nn.Module) -> list[Any]:
    """Return the program's hooks that reduce in place of a module."""
    found: list[Any] = vars(module).get("_comm_hooks", [])
    return found


def call_at_end(call: Callable[[], None]) -> None:
    """Call a function when this backward pass has computed all gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


class Unit(NamedTuple):
    """Parameters that FSDP gathers and reduces together.

    Attributes:
        module: The module whose parameters they are, or the first of these.
        number: Its number among the units of the module.
        is_backward: Whether it communicates for the backward pass now.
    """

    module: torch.nn.Module
    number: int
    is_backward: bool


#: Module with the functions of such units -> the variable that is the unit, its class, and its
#: attribute with the module.
UNITS = {
    "torch.distributed.fsdp._flat_param": ("self", "FlatParamHandle", "_fully_sharded_module"),
    "torch.distributed.fsdp._runtime_utils": ("handle", "FlatParamHandle", "_fully_sharded_module"),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": ("self", "FSDPParamGroup", "modules"),
}


def unit_of(frame: FrameType) -> Unit | None:
    """Return the unit of FSDP that a running function belongs to, if it is one of FSDP's."""
    known = UNITS.get(frame.f_globals.get("__name__", ""))
    if known is None:
        return None
    name, kind, attribute = known
    found = local_of(frame, name)
    modules = getattr(found, attribute, None) if type(found).__name__ == kind else None
    if not modules:
        return None
    state = str(getattr(found, "_training_state", ""))
    module = modules[0] if isinstance(modules, tuple) else modules
    return Unit(module, getattr(found, "_param_group_index", 0), "BACKWARD" in state)


#: Module with the stages of pipelines, and their class.
STAGES = ("torch.distributed.pipelining.stage", "PipelineStage")


def written(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the functional collective that writes a tensor, if there is one; return it."""
    waited: torch.Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return waited


def process_group(name: str) -> Any:
    """Return the process group of a name; None if there is none, or if it cannot be found."""
    resolve = getattr(torch.distributed.distributed_c10d, "_resolve_process_group", None)
    try:
        return None if resolve is None else resolve(name)
    except (RuntimeError, ValueError):
        return None


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the processes of a process group, by their numbers in the whole program."""
    try:
        return tuple(torch.distributed.get_process_group_ranks(group))
    except (KeyError, RuntimeError, ValueError):
        return tuple(range(group.size()))  # The program has made it without `new_group`.


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


def flattened(leaf: torch.Tensor) -> Iterator[tuple[str, torch.nn.Module, int, tuple[int, ...]]]:
    """Yield the parameters that one of FSDP1 consists of while it is whole: the name and module of
    each, the place at which it begins, and its shape.
    """
    infos = names_in(leaf)
    if infos is None:
        return
    places = iter(zip(infos, leaf._shapes, strict=True))  # type: ignore[attr-defined]
    start = 0
    lengths = leaf._numels_with_padding, leaf._is_padding_mask  # type: ignore[attr-defined]
    for length, is_padding in zip(*lengths, strict=True):
        if not is_padding:
            (name, module, _), shape = next(places)
            yield name, module, start, tuple(shape)
        start += length


def shards_in(leaf: torch.Tensor) -> Iterator[tuple[str, torch.nn.Module, int, int]]:
    """Yield the parameters that one of FSDP1 consists of while it is divided: name and module of
    each, and the place and the length of this process's part.
    """
    parts = getattr(leaf, "_shard_param_infos", ())
    for (name, module, _), part in zip(names_in(leaf) or (), parts, strict=bool(parts)):
        yield name, module, part.offset_in_shard or 0, part.numel_in_shard or 0


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


def reducible(module: torch.nn.Module) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the parameters whose gradients a wrapper for several processes reduces, each with
    those that stand in its place while it is gathered.
    """
    for group in sharded_groups(module):
        for one in group.fsdp_params:
            whole = getattr(one, "_unsharded_param", None)
            yield one.sharded_param, () if whole is None else (whole,)
    own = vars(module)  # A compiled wrapper has the attributes of what it wraps.
    if "reducer" in own:
        every: Any = module._module_parameters
        yield from ((parameter, ()) for parameter in every)
    elif (handle := own.get("_handle")) is not None:
        original = getattr(handle.flat_param, "_params", None)
        yield from ((parameter, ()) for parameter in original or (handle.flat_param,))


def reduces_now(module: torch.nn.Module) -> bool:
    """Return False for a module of FSDP1 that adds up gradients without reducing them, and for one
    of DistributedDataParallel whose last call was for that.
    """
    names = "_sync_gradients", "require_forward_param_sync"
    return all(bool(getattr(module, name, True)) for name in names)


def is_low_precision(parameter: torch.Tensor) -> bool:
    """Return True for a view of a copy that FSDP1 makes in another dtype."""
    flat = flat_parameter_of(parameter)
    return getattr(flat, "_mp_shard", None) is not None
