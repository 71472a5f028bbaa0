"""Modules of Flax (NNX and Linen) and Equinox: which objects they are, and what they hold.

A module that runs is the ``self`` of a frame, so nothing of these libraries is replaced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax

from amanda_driver_jax.arrays import known, origin
from amanda_driver_jax.identity.call_sites import is_users_code
from amanda_driver_jax.identity.path_modules import ModulePlace, PathModels

_LINEN = "flax.linen"
_LIBRARIES = ("flax.nnx", _LINEN, "equinox")


class Models(PathModels):
    """The models whose modules run. It finds the parameters that an operator reads."""

    def __init__(self) -> None:
        super().__init__(origin, known, is_users_code)

    def place(self, frame: FrameType | None) -> ModulePlace | None:
        """Return where the module that runs is in its model; None if none runs."""
        return None if sys.modules.keys().isdisjoint(_LIBRARIES) else super().place(frame)

    def library_of(self, owner: Any, name: str) -> str:
        """Return the library of a module whose method runs; empty for other objects."""
        library = _library_of(type(owner))
        # Functions that Equinox transforms are modules, and so are descriptions in Linen.
        wraps = library == "equinox" and type(owner).__module__.startswith("equinox._")
        is_unbound = library == _LINEN and owner.scope is None
        return "" if wraps or is_unbound or name == "__init__" else library

    def path_of(self, module: Any) -> str | None:
        """Return the path that a module of Linen knows."""
        return ".".join(module.scope.path) if _library_of(type(module)) == _LINEN else None

    def contents_of(self, root: Any) -> tuple[dict[str, Any], dict[int, str]]:
        """Return the parameters of a model by name, and the paths of its modules by their ids."""
        parameters: dict[str, Any] = {}
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
                # A variable of NNX is a parameter, or a statistic or the like.
                is_variable = hasattr(value, "get_raw_value")
                if is_variable and any(cls.__name__ == "Param" for cls in type(value).__mro__):
                    parameters[name] = value.get_raw_value()
                elif isinstance(value, jax.Array):
                    parameters[name] = value
                return is_variable

            jax.tree_util.tree_leaves_with_path(tree, is_leaf=note, is_leaf_takes_path=True)

        visit(root.variables.get("params", {}) if _library_of(type(root)) == _LINEN else root, ())
        return parameters, paths


def _named_library(kind: type) -> str:
    """Return the library of which a type is a module; empty for other types."""
    names = [str(cls.__module__) for cls in kind.__mro__ if cls.__name__ == "Module"]
    found = (library for name in names for library in _LIBRARIES if name.startswith(library))
    return next(found, "")


#: The same, remembered.
_library_of: Callable[[type], str] = functools.lru_cache(1024)(_named_library)
