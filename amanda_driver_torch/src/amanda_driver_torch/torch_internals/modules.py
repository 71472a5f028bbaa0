"""Reads of `nn.Module` past its public methods, which a class may override.

All names without an underscore are offered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from amanda_driver_torch.torch_internals.internals import read_base

#: Methods of a model that build, initialize, load or convert it; `_apply` is that of `to` and the
#: like.
BUILDING_METHODS = frozenset(
    [
        *("__init__", "init_weights", "_init_weights", "initialize_weights", "reset_parameters"),
        *("load_state_dict", "from_pretrained", "_apply"),
    ]
)
#: The module and the name of the function that runs each module's `forward`, with its hooks.
MODULE_CALLS = ("torch.nn.modules.module", "_call_impl")


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return a module's submodules by name; some may be None."""
    # It is read at many operators, nearly always of an ordinary module.
    children = module.__dict__.get("_modules")
    return children if type(children) is dict else _registry(module, "_modules")


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """Return a module's own parameters by name; some may be None."""
    parameters = module.__dict__.get("_parameters")
    return parameters if type(parameters) is dict else _registry(module, "_parameters")


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own buffers by name; some may be None."""
    buffers = module.__dict__.get("_buffers")
    return buffers if type(buffers) is dict else _registry(module, "_buffers")


def parameter_of(module: torch.nn.Module, name: str) -> Any:
    """Return a module's own parameter of this name, or None."""
    found = parameters_of(module).get(name)
    if found is None:
        # FSDP1 may keep a view of its flat parameter as a plain attribute.
        value = module.__dict__.get(name)
        held = isinstance(value, torch.Tensor) and flat_parameter_of(value) is not None
        return value if held else None
    return found


#: Names of torch's classes whose modules only wrap another one -> its name there.
_WRAPPERS = {
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
#: Those that no module of a program has.
HIDDEN_NAMES = frozenset(_WRAPPERS.values()) - {"module"}
#: FSDP1's parameter that holds those of a module, and its attribute with their names.
FLAT_PARAMETER, FLATTENED = "_flat_param", "_param_infos"


def wraps(module: torch.nn.Module) -> str:
    """Return the name of the module that a module of torch only wraps, or an empty string."""
    for kind in type(module).__mro__:
        if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
            return _WRAPPERS[kind.__name__]
    return ""


def inner_of(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside those that only wrap it, or the same one."""
    while (inner := children_of(module).get(wraps(module))) is not None:
        module = inner
    return module


def wraps_compiled(module: torch.nn.Module, inner: torch.nn.Module) -> bool:
    """Return True if a module is what `torch.compile` returns for another one."""
    return inner is not module and module.__dict__.get("_modules", {}).get("_orig_mod") is inner


def flat_parameter_of(tensor: torch.Tensor) -> Any:
    """Return the parameter of FSDP1 of which a tensor is a view, or None."""
    flat = read_base(tensor)
    return flat if flat is not None and names_in(flat) is not None else None


def names_in(tensor: torch.Tensor) -> Any:
    """Return what FSDP1 notes of the parameters of which one consists; None for other tensors."""
    # Not by `__dict__`: CPython would keep one for this tensor, and all later look-ups of its
    # methods would be slower, also without tools.
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return getattr(tensor, FLATTENED, None) if is_plain else None


def modules_in(
    module: torch.nn.Module, wrappers: bool = True
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a module and those under it, each once, with its qualified name.

    The module may be half built, and its class may override `named_modules`.

    Args:
        module: The module.
        wrappers: Whether those count that only wrap another module.
    """
    seen: set[int] = set()
    pending = [("", module)]
    while pending:
        name, found = pending.pop()
        number = id(found)
        if number in seen:
            continue
        seen.add(number)
        if not wrappers and (wrapped := wraps(found)):
            pending += [(name, one) for one in [children_of(found).get(wrapped)] if one is not None]
            continue
        yield name, found
        if children := children_of(found):
            prefix = f"{name}." if name else ""
            below = reversed(children.items())
            pending += [(prefix + key, child) for key, child in below if child is not None]


def _registry(module: torch.nn.Module, name: str) -> dict[str, Any]:
    # There is none before `nn.Module.__init__` has run, and reading it calls a `__getattr__`.
    registry = vars(module).get(name, {})
    # That of a scripted module has no more than items.
    return registry if isinstance(registry, dict) else dict(registry.items())


#: Registries in `torch.nn.modules.module` of hooks for every module -> kind of the hooks.
GLOBAL_MODULE_HOOKS: Mapping[str, str] = MappingProxyType(
    {
        "_global_forward_pre_hooks": "forward pre-hook",
        "_global_forward_hooks": "forward hook",
        "_global_backward_pre_hooks": "backward pre-hook",
        "_global_backward_hooks": "backward hook",
    }
)
