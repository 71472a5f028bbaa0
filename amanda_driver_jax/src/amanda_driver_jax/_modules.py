"""Modules of Flax (NNX and Linen) and Equinox: where an operator runs, and the parameters there.

A module that runs is the ``self`` of a frame, so nothing of these libraries is replaced. In
functional programs modules are made again all the time, so they are known by class and structure.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax

from amanda_core import OpContext
from amanda_core.frame_locals import methods_around
from amanda_core.immutable_parameters import ImmutableParameters
from amanda_core.path_sites import ModulePlace, StructuralLabels
from amanda_core.weak import Known
from amanda_core.weights.reads import Reads
from amanda_driver_jax._call_sites import is_users_code
from amanda_driver_jax._routines import known, original
from amanda_driver_jax._values import concrete

_LINEN = "flax.linen"
_LIBRARIES = ("flax.nnx", _LINEN, "equinox")


class Models:
    """The models whose modules run. It finds the parameters that an operator reads."""

    def __init__(self) -> None:
        #: Outermost module -> its label, and the paths of the modules inside it by their ids.
        self._models: Known[tuple[str, dict[int, str]]] = Known()
        self._finder = ImmutableParameters(original, known)
        self._labels = StructuralLabels()
        self._root: Any = None

    def place(self, frame: FrameType | None) -> ModulePlace | None:
        """Return where the module that runs is in its model; None if none runs."""
        if sys.modules.keys().isdisjoint(_LIBRARIES):
            return None
        running = list(_running(frame))
        if not running:
            return None
        inner, around = running[0]
        library = _library_of(type(inner))
        root = [module for module, _ in running if _library_of(type(module)) == library][-1]
        label, paths = self._models.get(root) or self._register(root)
        self._root = root
        path = ".".join(inner.scope.path) if library == _LINEN else paths.get(id(inner))
        if path is None:  # Which of several it is can be seen only by where it is called.
            return ModulePlace(label, f"<{type(inner).__qualname__}>")
        return ModulePlace(label, path, around)

    def _register(self, root: Any) -> tuple[str, dict[int, str]]:
        parameters, paths = _contents(root)
        structure = [(name, value.shape) for name, value in parameters.items()]
        model = self._labels.label(type(root).__qualname__, structure), paths
        self._models.set(root, model)
        return model

    def __call__(self, context: OpContext) -> Reads:
        """Return the parameters that an operator reads in this execution."""
        place = self.place(sys._getframe(1))
        if place is None:
            return Reads({}, dict)
        parameters, _ = _contents(self._root)
        values = {name: concrete(value) for name, value in parameters.items()}
        return self._finder.reads(context, place.root, values)


def _running(frame: FrameType | None) -> Iterator[tuple[Any, FrameType]]:
    """Yield the modules whose methods run, innermost first, with the frames of these methods."""
    for owner, around in methods_around(frame, is_users_code):
        library = _library_of(type(owner))
        if not library or around.f_code.co_name == "__init__":
            continue
        # Functions that Equinox transforms are modules, and so are descriptions in Linen.
        if library == _LINEN and owner.scope is None:
            continue
        if not type(owner).__module__.startswith("equinox._"):
            yield owner, around


@functools.lru_cache(1024)
def _library_of(kind: type) -> str:
    """Return the library of which a type is a module; empty for other types."""
    names = [str(cls.__module__) for cls in kind.__mro__ if cls.__name__ == "Module"]
    found = (library for name in names for library in _LIBRARIES if name.startswith(library))
    return next(found, "")


def _contents(root: Any) -> tuple[dict[str, Any], dict[int, str]]:
    """Return the parameters of a model by name, and the paths of its modules by their ids."""
    parameters: dict[str, Any] = {}
    paths: dict[int, str] = {}

    def note(path: Any, value: Any) -> bool:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        kind = type(value)
        if _library_of(kind):
            paths.setdefault(id(value), name)
        # A variable of NNX is a parameter, or a statistic or the like.
        is_variable = hasattr(value, "get_raw_value")
        if is_variable and any(cls.__name__ == "Param" for cls in kind.__mro__):
            parameters[name] = value.get_raw_value()
        elif isinstance(value, jax.Array):
            parameters[name] = value
        return is_variable

    tree = root.variables.get("params", {}) if _library_of(type(root)) == _LINEN else root
    jax.tree_util.tree_leaves_with_path(tree, is_leaf=note, is_leaf_takes_path=True)
    return parameters, paths
