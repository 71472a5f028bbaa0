"""What a framework looks like from outside: taken before and after, it must be the same.

Framework-free. A driver joins with the names of what it might touch and a function of what is not
an attribute; see `frameworks`.
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


def named(names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Modules (``torch.nn.functional``) and classes in modules (``torch.nn:Module``) by name."""
    for name in names:
        module, _, inside = name.partition(":")
        owner: Any = importlib.import_module(module)
        for part in inside.split(".") if inside else ():
            owner = getattr(owner, part)
        yield name, owner


def fingerprint(names: Iterable[str], more: Callable[[], Fingerprint]) -> Fingerprint:
    """Identities of all attributes of the owners, of the code of functions, and `more`.

    Of a module the classes that it defines are owners too.
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
        # A submodule appears in its parent once anybody imports it.
        if key in _BUILT_IN or isinstance(value, types.ModuleType):
            continue
        found[f"{name}.{key}"] = id(value)
        function = value.__func__ if isinstance(value, _BINDERS) else value
        if isinstance(function, types.FunctionType):
            found[f"{name}.{key} code"] = id(function.__code__)


def changed(before: Fingerprint, after: Fingerprint) -> list[str]:
    """Names of what is not as it was."""
    missing = object()
    names = list(before) + [name for name in after if name not in before]
    return [name for name in names if before.get(name, missing) != after.get(name, missing)]
