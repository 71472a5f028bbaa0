"""Modules of Flax (NNX and Linen) and Equinox: which objects they are, and what they hold.

A module that runs is the ``self`` of a frame, so nothing of these libraries is replaced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import jax

from amanda_driver_jax.arrays import origin
from amanda_driver_jax.identity.call_sites import is_users_code
from amanda_driver_jax.identity.path_modules import ModulePlace, PathModels
from amanda_driver_jax.identity.plain_trees import is_plain

_LINEN, _NNX, _EQUINOX = "flax.linen", "flax.nnx", "equinox"
_LIBRARIES = (_NNX, _LINEN, _EQUINOX)


class Models(PathModels):
    """The models whose modules run. It finds the parameters that an operator reads."""

    def __init__(self) -> None:
        super().__init__(origin, is_users_code)

    def place(self, frame: FrameType | None, called: Any = None) -> ModulePlace | None:
        """Return where the module that runs is in its model; None if none runs."""
        known = sys.modules  # Each operator comes by here: this is faster than `any`.
        if _NNX in known or _LINEN in known or _EQUINOX in known:
            return super().place(frame, called)
        return None

    def library_of(self, owner: Any, name: str) -> str:
        """Return the library of a module whose method runs; empty for other objects."""
        library = _library_of(type(owner))
        # Functions that Equinox transforms are modules, and so are descriptions in Linen.
        wraps = library == _EQUINOX and type(owner).__module__.startswith("equinox._")
        is_unbound = library == _LINEN and owner.scope is None
        return "" if wraps or is_unbound or name == "__init__" else library

    def path_of(self, module: Any) -> str | None:
        """Return the path that a module of Linen knows."""
        return ".".join(module.scope.path) if _library_of(type(module)) == _LINEN else None

    def counts_of(self, module: Any) -> dict[Any, Any] | None:
        """Return the counts of Linen, which has a scope for each module."""
        return module.scope.root.rng_counters if _library_of(type(module)) == _LINEN else None

    def contents_of(self, root: Any) -> tuple[dict[str, Any], dict[int, str]]:
        """Return the parameters of a model by name, and the paths of its modules by their ids."""
        if _library_of(type(root)) == _LINEN:
            root = root.variables.get("params", {})
        values, paths = _contents(root)
        parameters = {}
        for name, value in values.items():
            if not _is_variable(value):
                parameters[name] = value
            elif any(cls.__name__ == "Param" for cls in type(value).__mro__):
                parameters[name] = value.get_raw_value()
        return parameters, paths

    def variables_of(self, value: Any) -> dict[int, Any]:
        """Return the variables of NNX in a value, by the ids of their arrays."""
        is_tree = isinstance(value, (dict, list, tuple)) or _library_of(type(value))
        if _NNX not in sys.modules or not is_tree or is_plain(value):
            return {}
        try:
            values, _ = _contents(value)
        except Exception:  # A user's container may raise anything.
            return {}
        # That of a tracer belongs to the function that is transformed.
        return {id(one.get_raw_value()): one for one in values.values() if _is_variable(one)}


def _is_variable(value: Any) -> bool:
    """Return True for a variable of NNX: a parameter, or a statistic or the like."""
    return hasattr(type(value), "get_raw_value")


def _contents(root: Any) -> tuple[dict[str, Any], dict[int, str]]:
    """Return the variables and arrays in a tree by name, and the paths of its modules by ids."""
    values: dict[str, Any] = {}
    paths: dict[int, str] = {}

    def visit(tree: Any, around: tuple[Any, ...]) -> None:
        def note(path: tuple[Any, ...], value: Any) -> bool:
            name = jax.tree_util.keystr((*around, *path), simple=True, separator=".")
            if _library_of(type(value)):
                if id(value) in paths:  # A module may hold one that holds it.
                    return True
                paths[id(value)] = name
                if jax.tree_util.all_leaves([value]):  # NNX has modules that are not trees.
                    visit(vars(value), (*around, *path))
            if _is_variable(value) or isinstance(value, jax.Array):
                values[name] = value
            return _is_variable(value)

        jax.tree_util.tree_leaves_with_path(tree, is_leaf=note, is_leaf_takes_path=True)

    visit(root, ())
    return values, paths


def module_classes() -> Iterator[type]:
    """Yield all classes of modules of the libraries that are imported."""
    left = [sys.modules[name].Module for name in _LIBRARIES if name in sys.modules]
    seen: set[type] = set()
    while left:
        cls = left.pop()
        if cls not in seen:
            seen.add(cls)
            left += type.__subclasses__(cls)
            yield cls


def _named_library(kind: type) -> str:
    """Return the library of which a type is a module; empty for other types."""
    names = [str(cls.__module__) for cls in kind.__mro__ if cls.__name__ == "Module"]
    found = (library for name in names for library in _LIBRARIES if name.startswith(library))
    return next(found, "")


#: The same, remembered.
_library_of: Callable[[type], str] = functools.lru_cache(1024)(_named_library)
