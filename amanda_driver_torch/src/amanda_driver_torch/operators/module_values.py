"""The operators that stand for the first tensor in the input and in the output of a module."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

import torch

from amanda_core.driver_kit import MODULE_INPUT, MODULE_OUTPUT
from amanda_driver_torch.operators.operator import Operator

__all__ = ["INPUT", "OUTPUT", "replace_first"]

T = TypeVar("T")


def module_input(value: T) -> T:
    """Return the value."""
    return value


def module_output(value: T) -> T:
    """Return the value."""
    return value


# They have one input and return it.
INPUT = Operator(module_input, module_input, MODULE_INPUT)
OUTPUT = Operator(module_output, module_output, MODULE_OUTPUT)


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
        # A tensor that is traced is the same if a function returns it, whatever edits it there.
        if not torch.compiler.is_compiling() and new is item:
            return True, value
        if not isinstance(value, tuple):
            value[key] = new
            return True, value
        parts = (*value[:key], new, *value[key + 1 :])
        return True, value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    return False, value
