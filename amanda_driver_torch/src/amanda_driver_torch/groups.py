"""The processes that train a model together, and the parameters that they update.

Owns how they meet, which is what torch's wrappers say: `DistributedDataParallel`, FSDP1 and
`fully_shard`. Tools communicate here only where they decide: see `amanda_core.interface.groups`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from math import prod
from typing import Any, cast

import torch
from torch import nn

from amanda_core.interface import Group, How, NotReadableError, UnsupportedError
from amanda_driver_torch.placements import distributed, is_simulated, local
from amanda_driver_torch.torch_internals.distributed import (
    groups_of,
    is_low_precision,
    lets_join,
    ranks_of,
    sharded_groups,
    sharded_of,
)
from amanda_driver_torch.torch_internals.modules import inner_of, modules_in, parameters_of

__all__ = [
    "WRAPPERS",
    "gathered",
    "group_of",
    "holders_of",
    "master_of",
    "processes",
    "rank",
    "shares_layers",
    "wrappers",
]

#: The modules that only wrap others and were called under tools, by id, until they are freed. No
#: frame of Python may run to add one: inside a compiled callable Dynamo would trace it.
WRAPPERS: dict[int, weakref.ref[nn.Module]] = {}
#: How long a process waits for the others to come to a decision.
_PATIENCE = timedelta(minutes=5)
#: Name of a group -> how often its processes have met.
_MEETINGS: Counter[str] = Counter()


def wrappers() -> list[nn.Module]:
    """Return the modules that only wrap others and were called under tools."""
    return [module for known in list(WRAPPERS.values()) if (module := known()) is not None]


def processes() -> int:
    """Return how many processes run the program together."""
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    return int(torch.distributed.get_world_size()) if known else 1


def rank() -> int:
    """Return the number of this process among them."""
    return int(torch.distributed.get_rank()) if processes() > 1 else 0


class _Processes(Group):
    """Processes that average their gradients: those of each group, then across the groups."""

    def __init__(self, groups: list[Any]) -> None:
        self.groups = groups
        for group in groups:
            self.rank = self.rank + self.size * group.rank()
            self.size *= group.size()

    def exchange(self, text: str) -> list[str]:
        for group in self.groups:
            text = "|".join(found := _meet(group, text))
        return text.split("|") if len(self.groups) > 1 else found

    def reduce(self, values: Any, how: How) -> Any:
        tensor = torch.from_numpy(values.copy())
        operator = getattr(torch.distributed.ReduceOp, how.upper())
        for group in self.groups:
            gpu = "nccl" in torch.distributed.get_backend(group)
            tensor = tensor.cuda() if gpu else tensor
            torch.distributed.all_reduce(tensor, operator, group=group)
        return tensor.cpu().numpy()


def _meet(group: Any, text: str) -> list[str]:
    """Return the text of each process of a group, in the store with which it was set up.

    A collective would hang, or take part in another one, if a process does not come.
    """
    if torch.distributed.get_backend(group) == "fake":  # torch's, of processes that do not exist
        return [text] * group.size()
    _MEETINGS[group.group_name] += 1
    store, own = group.get_group_store(), group.rank()
    keys = [
        f"amanda/{group.group_name}/{_MEETINGS[group.group_name]}/{rank}"
        for rank in range(group.size())
    ]
    store.set(keys[own], text)
    try:
        store.wait(keys, _PATIENCE)
    except RuntimeError as error:
        here = [store.check([key]) for key in keys]
        away = [str(rank) for rank, came in enumerate(here) if not came]
        raise UnsupportedError(
            f"Processes {', '.join(away)} of {len(keys)} did not come to decide with this one",
            where=text,
            fix="Let all of them run the same operators and steps under the same tools, and put "
            "what only some of them run, such as an evaluation, under amanda.disabled()",
        ) from error
    return [store.get(key).decode() for key in keys]


def gathered(tensor: Any) -> torch.Tensor:
    """Return a distributed tensor as a whole.

    Raises:
        UnsupportedError: Another process that has a part of it does not gather it now.
    """
    mesh, what = tensor.device_mesh, f"a value of shape {tuple(tensor.shape)} as a whole"
    if not is_simulated(local(tensor)) and mesh.get_coordinate() is not None:
        for dimension, placement in enumerate(tensor.placements):
            if not placement.is_replicate():
                _meet(mesh.get_group(dimension), what)
    with torch.no_grad():
        return cast(torch.Tensor, tensor.full_tensor())


def group_of(model: Any) -> Group:
    """Return the processes that train a model with data of their own.

    Raises:
        UnsupportedError: It is not known which do.
    """
    if (count := processes()) == 1:
        return Group()
    if model is not None and (groups := _groups_of(model)) is not None:
        return _Processes(groups) if groups else Group()
    raise UnsupportedError(
        f"It is not known which of {count} processes train the model together",
        fix="Wrap it in DistributedDataParallel or call fully_shard; or decide in one process, "
        "save what was decided and load that in all",
    )


def _groups_of(model: nn.Module) -> list[Any] | None:
    """Return the groups over which gradients of a model are reduced; None if they are unknown."""
    for module in _wrappers_and_parts(model):
        if lets_join(module):
            raise UnsupportedError(
                "Processes that join early cannot decide with the others",
                fix="Decide in a run in which all of them have the same number of batches",
            )
        if groups := groups_of(module):
            return groups
    # Each process has a part of the layers, and all have the same data.
    return [] if _divides_weights(model) else None


def _wrappers_and_parts(model: nn.Module) -> list[nn.Module]:
    """Return the modules around a model that only wrap it, and those in it."""
    parts = [part for _, part in modules_in(model)]
    return [*(one for one in wrappers() if any(part is inner_of(one) for part in parts)), *parts]


def shares_layers(model: Any) -> bool:
    """Return True if not all processes are known to have the same layers, or parts of them."""
    if (count := processes()) == 1:
        return False
    if model is None or _divides_weights(model):
        return model is None
    groups = next(filter(None, map(groups_of, _wrappers_and_parts(model))), [])
    return prod(int(group.size()) for group in groups) < count


def holders_of(model: Any) -> Group:
    """Return the processes among which weights of a model are divided, without those of `group_of`.

    They are those along the dimensions of the meshes of its weights.
    """
    divided = [] if processes() == 1 or model is None else [*_distributed_in(model)]
    if not divided or any(is_simulated(local(one)) for one in divided):
        return Group()
    parts = _wrappers_and_parts(model)
    training = [{*ranks_of(group)} for part in parts for group in groups_of(part)]
    meshes = [one.device_mesh for one in divided if one.device_mesh.get_coordinate() is not None]
    found: dict[tuple[int, ...], Any] = {}
    for group in (mesh.get_group(dimension) for mesh in meshes for dimension in range(mesh.ndim)):
        ranks = ranks_of(group)
        if len(ranks) > 1 and not any(known.issuperset(ranks) for known in training):
            found[ranks] = group
    return _Processes([*found.values()]) if found else Group()


def _divides_weights(model: nn.Module) -> bool:
    """Return True if all processes have parts of the same weights."""
    return any(one.device_mesh.size() == processes() for one in _distributed_in(model))


def _distributed_in(model: nn.Module) -> Iterator[Any]:
    """Yield the parameters of a model that are distributed."""
    for _, part in modules_in(model):
        for one in parameters_of(part).values():
            if one is not None and distributed(type(one)):
                yield one


def master_of(parameter: Any, model: Any) -> Any:
    """Return the parameter that the optimizer updates, as a whole.

    Raises:
        NotReadableError: Operators read a copy in another dtype.
    """
    shards = torch.distributed.is_available() and torch.distributed.is_initialized()
    for _, module in modules_in(model) if shards and isinstance(model, nn.Module) else ():
        for group in sharded_groups(module):
            own = sharded_of(group, parameter)
            if own is not None and own.dtype != parameter.dtype:
                with torch.no_grad():
                    return own.full_tensor()
    if is_low_precision(parameter):
        raise NotReadableError("read as a copy of another dtype that FSDP1 makes")
    return parameter
