"""PyTorch's part of the rule of op identity: frames, modules, weights.

The rule itself is the core's (`amanda_core.identity.sites`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

import torch
from torch import nn

from amanda_core.driver_kit import (
    FRAMEWORK,
    OWN,
    QUIET,
    STOP,
    USER,
    Layouts,
    Rules,
    Scopes,
    methods_around,
)
from amanda_driver_torch.facts import FACTS
from amanda_driver_torch.identity.frames import BOUNDARY, is_own, is_torchs, looks_away
from amanda_driver_torch.identity.zones import zone_of
from amanda_driver_torch.threads.recordings import ACTIVE, current
from amanda_driver_torch.torch_internals.distributed import class_of
from amanda_driver_torch.torch_internals.internals import PARAMETER_MARK, read_base
from amanda_driver_torch.torch_internals.modules import (
    FLAT_PARAMETER,
    HIDDEN_NAMES,
    children_of,
    flat_parameter_of,
    modules_in,
    names_in,
    parameter_of,
    parameters_of,
    wraps,
)
from amanda_driver_torch.torch_internals.tensor_attributes import (
    is_weight,
    layout_of,
    memory_of,
    storage_of,
)

__all__ = ["LAYOUTS", "RULES", "new_scopes"]


def kind_of(code: CodeType, namespace: Mapping[str, Any]) -> int:
    """Return the kind of a frame that runs `code`, which says whether it is part of a call site."""
    if id(code) in BOUNDARY:
        return STOP
    if looks_away(code, namespace):
        return QUIET
    if is_torchs(namespace):
        return FRAMEWORK
    return OWN if is_own(code) else USER


def _is_marked(value: torch.Tensor) -> bool:
    """Return True for a parameter whose class is not `nn.Parameter`, such as a distributed one."""
    return getattr(value, PARAMETER_MARK, False) is True


RULES = Rules(
    kind_of=kind_of,
    weight_types=(nn.Parameter,),
    tensor_types=frozenset({torch.Tensor}),
    is_weight=is_weight,
    is_marked=_is_marked,
    zone_of=zone_of,
)


def new_scopes() -> Scopes:
    """Return a new table of the scopes of PyTorch's modules."""
    return Scopes(children_of, _weights_of, holder_of=_holder_of, wraps=wraps, class_of=class_of)


def _holder_of(module: nn.Module) -> nn.Module | None:
    """Return the outermost module of which a method is running and which holds this one."""
    found: nn.Module | None = None
    holds: dict[int, bool] = {}
    for owner, _ in methods_around(sys._getframe(1)):
        # Its type alone is read: the object may be anything.
        if issubclass(type(owner), nn.Module) and owner is not module and not wraps(owner):
            if id(owner) not in holds:
                holds[id(owner)] = any(part is module for _, part in modules_in(owner))
            found = owner if holds[id(owner)] else found
    return found


def _is_parameter(tensor: torch.Tensor) -> bool:
    # For a plain tensor, as the class of `nn.Parameter` does, which takes four times as long.
    if type(tensor) is torch.Tensor:
        return bool(getattr(tensor, PARAMETER_MARK, False)) or _is_flattened(tensor)
    return isinstance(tensor, nn.Parameter)


def _is_flattened(tensor: torch.Tensor) -> bool:
    """Return True for what FSDP1 shows in place of a parameter: a view of a flat one."""
    flat = flat_parameter_of(tensor)
    if flat is None:
        return False
    return any(parameter_of(owner, name) is tensor for name, owner, _ in names_in(flat))


def _base_of(tensor: torch.Tensor) -> torch.Tensor:
    base = read_base(tensor)
    return tensor if base is None or _is_flattened(tensor) else base


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    shape = FACTS.shape(tensor)
    return None if shape is None or None in shape else tuple(map(int, tensor.shape))


def _version_of(tensor: torch.Tensor) -> int | None:
    # The replays of a graph write without counting.
    return None if ACTIVE and current() is not None else FACTS.version(tensor)


#: How tensors show parts of parameters.
LAYOUTS = Layouts(
    layout_of,
    _shape_of,
    storage_of,
    _base_of,
    _is_parameter,
    is_weight,
    _version_of,
    parameter_of,
    memory_of,
)


def _weights_of(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    seen: set[int] = set()
    for path, owner in modules_in(module, wrappers=False):
        if not (parameters := parameters_of(owner)):
            continue
        prefix = f"{path}." if path else ""
        for name, parameter in parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                if name == FLAT_PARAMETER:
                    yield from _flattened(prefix, parameter)
                else:
                    yield prefix + name, owner, parameter


def _flattened(prefix: str, flat: Any) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield the parameters that one of FSDP1 holds, where they are whole now."""
    for name, owner, path in names_in(flat) or ():
        if isinstance(value := parameter_of(owner, name), torch.Tensor):
            parts = [part for part in path.split(".") if part and part not in HIDDEN_NAMES]
            yield prefix + ".".join([*parts, name]), owner, value
