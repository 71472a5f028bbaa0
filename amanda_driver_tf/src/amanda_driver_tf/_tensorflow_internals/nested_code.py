"""The functions that are written inside a function of TensorFlow, which only its code lists."""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any

__all__ = ["nested_codes"]


def nested_codes(function: Any) -> dict[str, CodeType]:
    """The code of each function inside a function, by name; empty for what is not in Python."""
    found: dict[str, CodeType] = {}
    waiting = [function.__code__] if isinstance(function, FunctionType) else []
    while waiting:
        inside = [each for each in waiting.pop().co_consts if isinstance(each, CodeType)]
        found.update((each.co_name, each) for each in inside)
        waiting += inside
    return found
