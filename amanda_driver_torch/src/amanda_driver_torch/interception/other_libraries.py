"""Findings about other libraries' hooks, modes and replaced functions in PyTorch.

Owns how each is found and named; `amanda doctor` shows them. Changes nothing, and is called only if
torch is imported.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from amanda_core.interface import Finding

__all__ = ["other_libraries"]

#: Packages whose functions are expected in torch's modules: torch, Python and this driver.
_KNOWN = frozenset({"torch", "amanda_driver_torch", "typing_extensions", *sys.stdlib_module_names})


def other_libraries() -> list[Finding]:
    """Return what was found, named by where it was defined."""
    return [*_of_hooks(), *_of_modes(), *_of_functions()]


def _of_hooks() -> Iterator[Finding]:
    import torch.nn.modules.module as module

    from amanda_driver_torch.torch_internals.modules import GLOBAL_MODULE_HOOKS

    for registry, what in GLOBAL_MODULE_HOOKS.items():
        hooks: Mapping[int, Any] = getattr(module, registry, {})
        for hook in hooks.values():
            if not _is_known(hook):
                yield Finding(
                    "warning",
                    f"A global {what} of modules is set: {_named(hook)}",
                    "It may change values in addition to the tools; remove it if it should not",
                )


def _of_modes() -> Iterator[Finding]:
    from amanda_driver_torch.torch_internals.internals import dispatch_modes, function_modes

    entered = {"torch function mode": function_modes(), "torch dispatch mode": dispatch_modes()}
    for what, modes in entered.items():
        for mode in modes:
            if not _is_known(type(mode)):
                yield Finding(
                    "warning",
                    f"A {what} is entered: {_named(type(mode))}",
                    "It may replace operators; leave it if only the tools should do so",
                )


def _of_functions() -> Iterator[Finding]:
    import torch
    from torch import nn

    for owner in (torch, torch.Tensor, torch.autograd, nn.functional, nn.Module):
        for name, function in list(vars(owner).items()):
            if inspect.isfunction(function) and not _is_known(function):
                yield Finding(
                    "info",
                    f"{owner.__name__}.{name} is replaced by {_named(function)}",
                    "The operators that it calls are seen, and not the function itself",
                )


def _is_known(value: Any) -> bool:
    return str(getattr(_inner(value), "__module__", None) or "torch").partition(".")[0] in _KNOWN


def _inner(value: Any) -> Any:
    while isinstance(value, functools.partial):
        value = value.func
    return value


def _named(value: Any) -> str:
    value = _inner(value)
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return f"{getattr(value, '__module__', '?')}.{name}"
