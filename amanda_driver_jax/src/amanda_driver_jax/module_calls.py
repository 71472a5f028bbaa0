"""Calls of modules: what they take and return is shown to the tools that ask for it.

Owns which classes have a replaced ``__call__``, while any tool asks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from amanda_driver_jax.identity.modules import module_classes
from amanda_driver_jax.interception import PATCHES, current_hold
from amanda_driver_jax.trace_keys import LOCAL

__all__ = ["module_input", "module_output", "show_modules"]


def module_input(value: Any) -> tuple[Any]:
    """Return the value: the operator for what a module takes."""
    return (value,)


def module_output(value: Any) -> tuple[Any]:
    """Return the value: the operator for what a module returns."""
    return (value,)


def show_modules() -> None:
    """Let calls of the modules of all libraries come by, until the last tool is removed."""
    with PATCHES.lock:
        for cls in module_classes():
            original = vars(cls).get("__call__")
            if original is not None and not hasattr(original, "_amanda_original"):
                PATCHES.replace(cls, "__call__", _shown(original))


def _shown(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # An object without `__get__` does not get the module, like wherever Python calls one.
        bound = original.__get__(self, type(self)) if hasattr(original, "__get__") else original
        hold, before = current_hold(), LOCAL.module
        # A class calls that of its base class for the same module.
        if hold is None or not hold.session.watches_values or before is self:
            return bound(*args, **kwargs)
        LOCAL.module = self
        try:
            return hold.call_module(self, bound, args, kwargs, sys._getframe(1))
        finally:
            LOCAL.module = before

    call._amanda_original = original  # type: ignore[attr-defined]
    return call
