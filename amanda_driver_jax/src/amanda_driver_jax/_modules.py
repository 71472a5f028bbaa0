"""Modules of Flax (NNX and Linen) and Equinox: where an operator runs, and the parameters there.

A module that runs is the ``self`` of a frame, so nothing of these libraries is replaced. In
functional programs modules are made again all the time, so they are known by class and structure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import jax

from amanda_core import OpContext
from amanda_core.frame_locals import local_of
from amanda_core.immutable_parameters import ImmutableParameters
from amanda_core.weak import Known
from amanda_core.weights.reads import Reads
from amanda_driver_jax._call_sites import Place, is_users_frame
from amanda_driver_jax._routines import known, original
from amanda_driver_jax._values import concrete

_LIBRARIES = ("flax.nnx", "flax.linen", "equinox")


class _Model(NamedTuple):
    """An outermost module: its label, and the paths of the modules inside it by their ids."""

    label: str
    paths: dict[int, str]


class Models:
    """The models whose modules run. It finds the parameters that an operator reads."""

    def __init__(self) -> None:
        self._models: Known[_Model] = Known()
        self._finder = ImmutableParameters(original, known)
        self._labels: dict[str, list[Any]] = {}

    def place(self, frame: FrameType | None) -> Place | None:
        """Return where the module that runs is in its model; None if none runs."""
        if sys.modules.keys().isdisjoint(_LIBRARIES):
            return None
        classes = tuple(
            vars(sys.modules[name])["Module"]
            for name in _LIBRARIES
            if "Module" in vars(sys.modules.get(name, sys))
        )
        running = list(_running(frame, classes)) if classes else []
        if not running:
            return None
        inner, around = running[0]
        root = _outermost([module for module, _ in running])
        model = self._models.get(root)
        if model is None:
            parameters = dict(_parameters(root))
            paths = {id(module): path for path, module in _walk(root, "") if _is_module(module)}
            model = _Model(self._label(type(root).__qualname__, parameters), paths)
            self._models.set(root, model)
        self.root = root
        if _is_linen(inner):
            return Place(model.label, ".".join(inner.scope.path), around)
        path = model.paths.get(id(inner))
        if path is None:  # Which of several it is can be seen only by where it is called.
            return Place(model.label, f"<{type(inner).__qualname__}>", None)
        return Place(model.label, path, around)

    def _label(self, name: str, parameters: dict[str, Any]) -> str:
        structure = [(key, jax.numpy.shape(value)) for key, value in parameters.items()]
        known_ones = self._labels.setdefault(name, [])
        if structure not in known_ones:
            known_ones.append(structure)
        number = known_ones.index(structure) + 1
        return name if number == 1 else f"{name}#{number}"

    def __call__(self, context: OpContext) -> Reads:
        """Return the parameters that an operator reads in this execution."""
        place = self.place(sys._getframe(1))
        if place is None:
            return Reads({}, dict)
        values = {name: concrete(value) for name, value in _parameters(self.root)}
        return self._finder.reads(context, place.model, values)


def _running(frame: FrameType | None, classes: tuple[type, ...]) -> Iterator[tuple[Any, FrameType]]:
    """Yield the modules whose methods run, innermost first, with the frames of these methods."""
    while frame is not None:
        code = frame.f_code
        if (
            code.co_varnames[:1] == ("self",)
            and code.co_name != "__init__"
            and is_users_frame(frame)
        ):
            module = local_of(frame, "self")
            if isinstance(module, classes) and not _is_wrapper(module):
                yield module, frame
        frame = frame.f_back


def _is_wrapper(module: Any) -> bool:
    """Return True for Equinox' transformed functions, and descriptions of modules of Linen."""
    own = type(module).__module__.startswith("equinox._")
    return own or (_is_linen(module) and module.scope is None)


def _outermost(modules: list[Any]) -> Any:
    kind = _library_of(modules[0])
    return [module for module in modules if _library_of(module) == kind][-1]


def _library_of(module: Any) -> str:
    names = (str(cls.__module__) for cls in type(module).__mro__ if cls.__name__ == "Module")
    return next(names, "")


def _is_module(value: Any) -> bool:
    return _library_of(value) != ""


def _is_linen(value: Any) -> bool:
    return _library_of(value).startswith("flax.linen")


def _parameters(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the parameters of a model."""
    tree = root.variables.get("params", {}) if _is_linen(root) else root
    for path, value in _walk(tree, ""):
        if isinstance(value, jax.Array):
            yield path, value


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the modules, parameters and arrays in a model, with their paths."""
    yield path, value
    if hasattr(value, "get_raw_value"):  # A variable of NNX, such as a parameter or a statistic.
        if any(cls.__name__ == "Param" for cls in type(value).__mro__):
            yield path, value.get_raw_value()
        return
    if isinstance(value, (list, tuple)):
        inner: Any = enumerate(value)
    elif isinstance(value, dict):
        inner = value.items()
    else:
        inner = vars(value).items() if _is_module(value) else ()
    for name, each in inner:
        if not str(name).startswith("_"):
            yield from _walk(each, f"{path}.{name}" if path else str(name))
