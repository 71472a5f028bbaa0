"""Inputs and outputs of modules, as values of operators.

Owns where the first tensor is in a call's arguments or its result, and how another one takes its
place. Mutable containers are changed where they are, as a hook on the module would do it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

import torch

__all__ = ["replace_first", "unchanged"]

T = TypeVar("T")


def unchanged(value: T) -> T:
    """Return the value: what the operators for values of modules compute."""
    return value


def replace_first(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return `value` with `function` applied to the first tensor in it.

    Lists, tuples and mappings are searched in their order; other objects are not.
    """
    return _replaced(value, function)[1]


def _replaced(value: Any, function: Callable[[torch.Tensor], Any]) -> tuple[bool, Any]:
    """Return whether there is a tensor in `value`, and the replacement of `value`."""
    if isinstance(value, torch.Tensor):
        return True, function(value)
    if isinstance(value, (list, tuple)):
        items: Any = enumerate(value)
    elif isinstance(value, MutableMapping):
        items = list(value.items())
    else:
        return False, value
    for key, item in items:
        found, new = _replaced(item, function)
        if not found:
            continue
        if new is item:
            return True, value
        if not isinstance(value, tuple):
            value[key] = new
            return True, value
        parts = (*value[:key], new, *value[key + 1 :])
        return True, value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    return False, value
