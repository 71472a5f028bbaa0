"""PyTorch's part of the rule of op identity: frames, modules, weights, parts of a program.

The rule itself is the core's (`amanda_core.sites`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from amanda_core.frame_locals import local_of, methods_around
from amanda_core.scopes import Labels, Scopes
from amanda_core.sites import FRAMEWORK, OWN, QUIET, STOP, USER, Rules
from amanda_core.weights.parameters import Layouts, Parameters
from amanda_driver_torch._identity.frames import is_own, is_torchs, looks_away
from amanda_driver_torch._torch.facts import FACTS
from amanda_driver_torch._torch.internals import (
    BUILDING_METHODS,
    PARAMETER_MARK,
    children_of,
    modules_in,
    parameter_of,
    parameters_of,
)
from amanda_driver_torch._torch.tensor_attributes import (
    is_weight,
    layout_of,
    memory_of,
    storage_of,
)

__all__ = ["BOUNDARY", "RULES", "may_decide_zone", "new_labels", "new_parameters", "new_scopes"]

#: Codes at which a call site ends, by id, since some that Dynamo makes cannot be hashed: what lies
#: further out may differ between a first run and a recomputation. Module calls and checkpointed
#: functions add theirs.
BOUNDARY: dict[int, CodeType] = {}


def kind_of(code: CodeType, namespace: Mapping[str, Any]) -> int:
    """Return the kind of a frame that runs `code`, which says whether it is part of a call site."""
    if id(code) in BOUNDARY:
        return STOP
    if looks_away(code, namespace):
        return QUIET
    if is_torchs(namespace):
        return FRAMEWORK
    return OWN if is_own(code) else USER


def zone_of() -> str:
    """Return which part of a program runs, by the frames from the call up to the user's first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        role = _ROLES.get(id(frame.f_code)) or _role_of(frame.f_code, frame.f_globals)
        if not role.counts:
            frame = frame.f_back
            continue
        if role.ends:
            return "model"
        if role.zone:
            return role.zone
        if role.owned:
            owner = local_of(frame, "self")
            if isinstance(owner, nn.Module) and role.builds:
                return "init"
            if isinstance(owner, torch.optim.Optimizer):
                return "optimizer"
        if role.users:
            # Further out it may be an optimizer that calls the user's closure.
            return "init" if _is_building(frame) else "model"
        frame = frame.f_back
    return "model"


@dataclass(slots=True)
class _Role:
    """What a code object says about the part of a program that runs.

    Attributes:
        code: The code, held so that its address is not used again.
        ends: Whether it is a boundary of call sites.
        zone: The zone that it is in, whatever calls it; or an empty string.
        owned: Whether its `self` may decide.
        builds: Whether it builds, if it is a module's; `runs`: whether it runs one.
        users: Whether it is the user's.
        owner: The variable that holds the object or class whose method it is.
        counts: Whether it may decide anything.
    """

    code: CodeType
    ends: bool
    zone: str
    owned: bool
    builds: bool
    runs: bool
    users: bool
    owner: str
    counts: bool


#: By id of the code object: comparing code objects takes longer than all the rest.
_ROLES: dict[int, _Role] = {}
_ROLES_KEPT = 16384


def may_decide_zone(code: CodeType, namespace: Mapping[str, Any]) -> bool:
    """Return False for code that `zone_of` passes over or takes for the model's."""
    role = _role_of(code, namespace)
    return bool(role.zone or role.owned)


def _role_of(code: CodeType, namespace: Mapping[str, Any]) -> _Role:
    module = str(namespace.get("__name__", ""))
    zone = "init" * (module == "torch.nn.init") or "optimizer" * module.startswith("torch.optim.")
    builds = code.co_name in BUILDING_METHODS
    users = not (is_torchs(namespace) or is_own(code))
    owned = builds or code.co_name == "step"
    ends, runs = id(code) in BOUNDARY, code.co_name == "forward"
    owner = "self" if "self" in code.co_varnames else "cls"
    counts = bool(ends or zone or owned or users)
    role = _Role(code, ends, zone, owned, builds, runs, users, owner, counts)
    if len(_ROLES) > _ROLES_KEPT:
        _ROLES.clear()
    _ROLES[id(code)] = role
    return role


def _is_building(frame: FrameType | None) -> bool:
    """Return True if a model is built, initialized or loaded around a frame.

    A library does so in functions of its own, which its models' constructors and loaders call.
    """
    while frame is not None:
        role = _ROLES.get(id(frame.f_code)) or _role_of(frame.f_code, frame.f_globals)
        if role.ends:
            return False
        if role.builds or role.runs:
            owner = local_of(frame, role.owner)
            kind = owner if isinstance(owner, type) else type(owner)
            if issubclass(kind, nn.Module):
                return role.builds  # A constructor may run the model.
        frame = frame.f_back
    return False


RULES = Rules(
    kind_of=kind_of,
    weight_types=(nn.Parameter,),
    tensor_types=frozenset({torch.Tensor}),
    is_weight=is_weight,
    zone_of=zone_of,
)


def new_scopes() -> Scopes:
    """Return a new table of the scopes of PyTorch's modules."""
    return Scopes(children_of, _weights_of, holder_of=_holder_of)


def _holder_of(module: nn.Module) -> nn.Module | None:
    """Return the outermost module of which a method is running and which holds this one."""
    found: nn.Module | None = None
    holds: dict[int, bool] = {}
    for owner, _ in methods_around(sys._getframe(1)):
        # Its type alone is read: the object may be anything.
        if issubclass(type(owner), nn.Module) and owner is not module:
            if id(owner) not in holds:
                holds[id(owner)] = any(part is module for _, part in modules_in(owner))
            found = owner if holds[id(owner)] else found
    return found


def new_labels() -> Labels:
    """Return a new table of labels for tensors."""
    return Labels(RULES.weight_types)


def new_parameters(scopes: Scopes, labels: Labels) -> Parameters:
    """Return a new table of the parameters that tensors show parts of."""
    return Parameters(scopes, labels, _LAYOUTS)


def _is_parameter(tensor: torch.Tensor) -> bool:
    # For a plain tensor, as the class of `nn.Parameter` does, which takes four times as long.
    if type(tensor) is torch.Tensor:
        return bool(getattr(tensor, PARAMETER_MARK, False))
    return isinstance(tensor, nn.Parameter)


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    shape = FACTS.shape(tensor)
    return None if shape is None or None in shape else tuple(map(int, tensor.shape))


_LAYOUTS = Layouts(
    layout_of,
    _shape_of,
    storage_of,
    FACTS.base,
    _is_parameter,
    is_weight,
    FACTS.version,
    parameter_of,
    memory_of,
)


def _weights_of(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    seen: set[int] = set()
    for path, owner in modules_in(module):
        if not (parameters := parameters_of(owner)):
            continue
        prefix = f"{path}." if path else ""
        for name, parameter in parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield prefix + name, owner, parameter
