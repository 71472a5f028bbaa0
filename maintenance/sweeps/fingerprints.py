"""Fingerprint of a framework as seen from outside, which must be the same before and after.

Framework-free. A framework is described by the names of what its driver might change and a function
for state that is not an attribute; see `frameworks`.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

#: Name -> identity or state.
Fingerprint = dict[str, Any]

_BINDERS = (staticmethod, classmethod, types.MethodType)
_BUILT_IN = frozenset(type.__dict__) | {"__dict__", "__weakref__", "__doc__", "__module__"}
#: Python keeps there which warnings it has shown, and which slots an object has that it pickled.
_BOOKKEEPING = _BUILT_IN | {"__warningregistry__", "__slotnames__"}


def named(names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield modules (``torch.nn.functional``) and classes (``torch.nn:Module``) by name."""
    for name in names:
        module, _, inside = name.partition(":")
        owner: Any = importlib.import_module(module)
        for part in inside.split(".") if inside else ():
            owner = getattr(owner, part)
        yield name, owner


def fingerprint(names: Iterable[str], more: Callable[[], Fingerprint]) -> Fingerprint:
    """Return the identities of all attributes of the owners and of functions' code, and `more`.

    The classes that a module defines are owners as well.
    """
    found: Fingerprint = {"meta path": [id(finder) for finder in sys.meta_path]}
    for name, owner in named(names):
        _attributes(found, name, owner)
        if not isinstance(owner, types.ModuleType):
            continue
        for key, value in list(vars(owner).items()):
            if isinstance(value, type) and value.__module__ == owner.__name__:
                _attributes(found, f"{name}:{key}", value)
    return {**found, **more()}


def _attributes(found: Fingerprint, name: str, owner: Any) -> None:
    for key, value in list(vars(owner).items()):
        # A submodule becomes an attribute of its parent once something imports it.
        if key in _BOOKKEEPING or isinstance(value, types.ModuleType):
            continue
        found[f"{name}.{key}"] = id(value)
        function = value.__func__ if isinstance(value, _BINDERS) else value
        if isinstance(function, types.FunctionType):
            found[f"{name}.{key} code"] = id(function.__code__)


def changed(before: Fingerprint, after: Fingerprint) -> list[str]:
    """Return the names of what has changed."""
    missing = object()
    names = list(before) + [name for name in after if name not in before]
    return [name for name in names if before.get(name, missing) != after.get(name, missing)]
