"""The zone of a call: which part of a program runs that is not the model.

Owns what the frames around an operator say. `interception.zone_calls` enters the zones whose
beginning and end torch itself marks; the rest is found here, once for each op.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from amanda_core.driver_kit import local_of, named_zone
from amanda_driver_torch.identity.frames import BOUNDARY
from amanda_driver_torch.torch_internals.distributed import COMMUNICATING
from amanda_driver_torch.torch_internals.modules import BUILDING_METHODS, MODULE_CALLS

__all__ = ["ZONES", "may_decide_zone", "zone_of"]

#: What the dotted name of a function begins with -> the zone of everything that it calls.
ZONES = {
    **dict.fromkeys(COMMUNICATING, "communication"),
    "torch.nn.init.": "init",
    "torch.optim.": "optimizer",
    "torch.distributed.optim.": "optimizer",
    "torch.amp.grad_scaler.": "optimizer",
    "torch.cuda.amp.grad_scaler.": "optimizer",
    "torch.distributed.fsdp.sharded_grad_scaler.": "optimizer",
    "torch.nn.utils.clip_grad.": "optimizer",
    "torch.utils.data.": "data",
    "timm.utils.model_ema.": "optimizer",
    "timm.utils.clip_grad.": "optimizer",
    "timm.utils.agc.": "optimizer",
    "torch_ema.": "optimizer",
    "ema_pytorch.": "optimizer",
    "torchmetrics.": "metrics",
    "torcheval.metrics.": "metrics",
    "ignite.metrics.": "metrics",
    "keras.src.optimizers.": "optimizer",
    "keras.src.backend.torch.optimizers.": "optimizer",
    "keras.src.initializers.": "init",
    "keras.src.metrics.": "metrics",
    "keras.src.trainers.compile_utils.update_state": "metrics",
    "keras.src.trainers.compile_utils.result": "metrics",
    "keras.src.trainers.trainer.compute_metrics": "metrics",
    "keras.src.trainers.data_adapters.": "data",
}
#: What the classes have that keep an average of weights, in diffusers and elsewhere.
_AVERAGE = ("copy_to", "store", "restore")


def zone_of() -> str:
    """Return which part of a program runs, by the frames from the call outwards."""
    frame: FrameType | None = sys._getframe(1)
    passed: list[CodeType] = []
    while frame is not None:
        role = _ROLES.get(id(frame.f_code)) or _role_of(frame.f_code, frame.f_globals)
        if role.ends:
            return "model"
        if role.zone:
            return role.zone
        if role.owner and (zone := _zone_of_method(frame, role, passed)):
            return zone
        passed.append(frame.f_code)
        frame = frame.f_back
    return "model"


def _zone_of_method(frame: FrameType, role: _Role, passed: list[CodeType]) -> str:
    """Return the zone that a running method decides by the object or class that it belongs to."""
    owner = local_of(frame, role.owner)
    kind = owner if isinstance(owner, type) else type(owner)
    if role.steps and all(hasattr(kind, name) for name in _AVERAGE):
        return "optimizer"
    if issubclass(kind, nn.Module):
        # A constructor may run the model.
        return "init" if role.builds else "model" if role.runs else ""
    if not role.steps or not _is_optimizer(kind):
        return ""
    # What it calls may be the user's closure, which runs the model.
    code = role.code
    names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    called = {_code_of(local_of(frame, name)) for name in names}
    return "model" if any(one in called for one in passed) else "optimizer"


def _code_of(value: Any) -> CodeType | None:
    if type(value) is MethodType:
        value = value.__func__
    return value.__code__ if type(value) is FunctionType else None


def _is_optimizer(kind: type) -> bool:
    """Return True for optimizers and schedulers, also for those that do not derive from torch's."""
    if issubclass(kind, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
        return True
    return all(hasattr(kind, name) for name in ("step", "zero_grad"))


@dataclass(slots=True)
class _Role:
    """The zone to which a code object belongs, as far as the code alone tells.

    Attributes:
        code: The code, held so that its address is not used again.
        ends: Whether it is a boundary: what lies further out does not decide.
        zone: The zone that it is in, whatever calls it; or an empty string.
        builds: Whether it builds, if it is a module's; `runs`: whether it runs one; `steps`:
            whether it is the step of an optimizer, if it is a method of one.
        owner: The variable that holds the object or class whose method it is, if that may decide.
    """

    code: CodeType
    ends: bool
    zone: str
    builds: bool
    runs: bool
    steps: bool
    owner: str


#: By id of the code object: comparing code objects takes longer than all the rest.
_ROLES: dict[int, _Role] = {}
_ROLES_KEPT = 16384


def may_decide_zone(code: CodeType, namespace: Mapping[str, Any]) -> bool:
    """Return False for code that `zone_of` passes over or takes for the model's."""
    role = _role_of(code, namespace)
    return bool(role.zone or role.builds or role.steps)


def _role_of(code: CodeType, namespace: Mapping[str, Any]) -> _Role:
    name = code.co_name
    zone = named_zone(ZONES, str(namespace.get("__name__", "")), name)
    builds, runs, steps = name in BUILDING_METHODS, name == "forward", name == "step"
    ends = id(code) in BOUNDARY or (namespace.get("__name__"), name) == MODULE_CALLS
    owner = code.co_varnames[0] if code.co_argcount and (builds or runs or steps) else ""
    role = _Role(code, ends, zone, builds, runs, steps, owner)
    if len(_ROLES) > _ROLES_KEPT:
        _ROLES.clear()
    _ROLES[id(code)] = role
    return role
