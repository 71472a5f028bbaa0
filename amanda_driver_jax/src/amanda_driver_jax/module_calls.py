"""Calls of modules: what they take and return is shown to the tools that ask for it.

Owns which classes have a replaced ``__call__``, while any tool asks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from amanda_driver_jax.identity.modules import module_classes
from amanda_driver_jax.interception import PATCHES, current_hold
from amanda_driver_jax.trace_keys import LOCAL

__all__ = ["module_input", "module_output", "replace_first", "show_modules"]


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


def replace_first(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return `value` with `function` applied to the first array in it.

    Lists, tuples and mappings are searched in their order; other objects are not.
    """
    found = next(_paths(value), None)
    return value if found is None else _replaced(value, found, function)


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, (jax.Array, np.ndarray)):
        yield ()
    items = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, (list, tuple)) else items:
        for path in _paths(item):
            yield (key, *path)


def _replaced(value: Any, path: tuple[Any, ...], function: Callable[[Any], Any]) -> Any:
    if not path:
        return function(value)
    old = value[path[0]]
    new = _replaced(old, path[1:], function)
    if new is old:
        return value
    if isinstance(value, Mapping):
        return type(value)({**value, path[0]: new})  # type: ignore[call-arg]
    parts = [new if n == path[0] else item for n, item in enumerate(value)]
    return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
