"""Values that are remembered without being kept alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["only", "strongly", "weakly"]


class _Weak:
    """A weak reference that cannot be taken for a value."""

    __slots__ = ("ref",)

    def __init__(self, value: Any) -> None:
        self.ref = weakref.ref(value)


def weakly(value: Any) -> Any:
    """A value, or the values in sequences, by weak references where there can be one."""
    if isinstance(value, (list, tuple)):
        return [weakly(item) for item in value]
    try:
        return _Weak(value)
    except TypeError:
        return value  # Numbers, strings and None hold nothing alive.


def strongly(value: Any) -> Any:
    """What `weakly` was given, with None for what has died since."""
    if isinstance(value, list):
        return [strongly(item) for item in value]
    return value.ref() if isinstance(value, _Weak) else value


def only(remembered: Any, keep: Callable[[Any], Any]) -> Any:
    """What `weakly` gives of the single values as `keep` maps them."""
    if isinstance(remembered, list):
        return [only(item, keep) for item in remembered]
    return weakly(keep(strongly(remembered)))
