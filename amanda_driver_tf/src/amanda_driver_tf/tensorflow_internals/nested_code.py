"""The code of nested functions of TensorFlow, which are only accessible through the outer one."""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any

__all__ = ["nested_codes"]


def nested_codes(function: Any) -> dict[str, CodeType]:
    """Return the code of each function nested in a function, by name; empty for builtins."""
    found: dict[str, CodeType] = {}
    waiting = [function.__code__] if isinstance(function, FunctionType) else []
    while waiting:
        inside = [each for each in waiting.pop().co_consts if isinstance(each, CodeType)]
        found.update((each.co_name, each) for each in inside)
        waiting += inside
    return found
