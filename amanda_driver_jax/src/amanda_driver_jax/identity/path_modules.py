"""Modules that programs make again at each call: where one runs, and the parameters there.

A model is known by its class and structure, and a module that runs by the frame of its method.
`modules` knows the libraries.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

from amanda_core.driver_kit import Known, OpContext, Reads, methods_around
from amanda_driver_jax import jax_internals as internals
from amanda_driver_jax.arrays import Shown, sources_of
from amanda_driver_jax.identity.current_arrays import CurrentArrays
from amanda_driver_jax.identity.immutable_parameters import ImmutableParameters
from amanda_driver_jax.identity.parameter_index import ParameterIndex, ParameterIndices
from amanda_driver_jax.identity.plain_trees import arguments_of, parameter_trees
from amanda_driver_jax.trace_keys import LOCAL

__all__ = ["ModulePlace", "PathModels"]

#: Common types of operators that read the parameters of a layer. Others may read them for an
#: optimizer, or for a term of the loss.
_LAYERS = frozenset(["add", "einsum", "embedding", "gather", "linear", "matmul", "mul"])
#: The label of parameters that are not in modules.
_PLAIN = "params"


class ModulePlace(NamedTuple):
    """Where a module that runs is.

    Attributes:
        root: The label of its model; empty outside of models.
        path: Its path in the model, such as ``layers.0``; empty for the model itself. The name of
            its class in ``<>`` if the path is not known.
        around: The frame of its method, so that callers of it do not matter; None if the path does
            not tell which module it is.
        call: The frame of the method of its model that is running; None outside of models.
    """

    root: str
    path: str
    around: FrameType | None = None
    call: FrameType | None = None


class PathModels(ABC):
    """The models whose modules run. It finds the parameters that an operator reads.

    A subclass knows the libraries of modules. It supplies `library_of` and `contents_of`, and
    overrides `variables_of`, `counts_of` and `path_of` if its libraries have variables, counts of
    random numbers or paths. An instance is kept with the contexts.

    Args:
        source: Gets an input of an operator. Returns the array that this input is, or is a part or
            a copy of, and which part (`Shown`).
        counts: Gets the code object of a running function. Returns False if its frame is skipped in
            the search for modules and parameters, as frames of JAX are.
    """

    def __init__(
        self,
        source: Callable[[Any], Shown],
        counts: Callable[[CodeType], bool],
    ) -> None:
        self._origin_of, self._counts = source, counts
        self._indices = ParameterIndices(self._whole)
        #: What the parameters are now.
        self.arrays = CurrentArrays(self._variable_of)
        #: Outermost module -> its label, and the paths of the modules inside it by their ids.
        self._models: Known[tuple[str, Mapping[int, str]]] = Known()
        #: Name of a class, or of a layer -> what those of the name were made of, in the order of
        #: their labels.
        self._structures: dict[str, list[Any]] = {}
        self._root: Any = None
        #: Label of a model -> the classes of those of its modules that have run, by their paths.
        self._classes: dict[str, dict[str, str]] = {}

    @abstractmethod
    def library_of(self, owner: Any, name: str) -> str:
        """Return the library of a module whose method runs; empty for other objects.

        Args:
            owner: An object, which may be anything.
            name: The name of its method.
        """

    @abstractmethod
    def contents_of(self, root: Any) -> tuple[dict[str, Any], Mapping[int, str]]:
        """Return the parameters of a model by name, and the paths of its modules by their ids."""

    def variables_of(self, value: Any) -> dict[int, Any]:
        """Return the variables in a model, or in anything else, by the ids of their arrays.

        Empty unless a subclass overrides it.
        """
        return {}

    def counts_of(self, module: Any) -> dict[Any, Any] | None:
        """Return how often random numbers were drawn in the model of a module; None if unknown.

        `repeating` writes the counts back into these dictionaries, which may be nested.
        """
        return None

    def repeating(self, frame: FrameType | None) -> Callable[[], None]:
        """Return a function to call before each call of another one, which repeats its randomness.

        It resets the counts of random numbers to those of now, so that each call draws the same.

        Args:
            frame: The frame that makes the calls. The models that run around it are reset.
        """
        found = [self.counts_of(module) for module, _, _ in self._running(frame)]
        kept = [(counts, _copy(counts)) for counts in found if counts is not None]

        def repeat() -> None:
            for counts, before in kept:
                _restore(counts, before)

        return repeat

    def path_of(self, module: Any) -> str | None:
        """Return the path that a module itself knows; None if it knows none."""
        return None

    def place(self, frame: FrameType | None, called: Any = None) -> ModulePlace | None:
        """Return where the module that runs is in its model; None if none runs.

        Args:
            frame: The frame from which modules that run are looked for, outwards.
            called: A module that this frame calls, which then counts as the innermost one.
        """
        running: list[tuple[Any, FrameType | None, str]] = list(self._running(frame))
        if library := called is not None and self.library_of(called, "__call__"):
            running.insert(0, (called, None, str(library)))
        if not running:
            return None
        inner, around, library = running[0]
        # A module of one library may be called by one of another.
        root, call = [(one, its) for one, its, owner in running if owner == library][-1]
        label, paths = self._models.get(root) or self._register(root)
        self._root = root
        path = self.path_of(inner)
        path = paths.get(id(inner)) if path is None else path
        if path is None:  # Which of several it is can be seen only by where it is called.
            return ModulePlace(label, f"<{type(inner).__qualname__}>", None, call)
        return ModulePlace(label, path, around, call)

    def __call__(self, context: OpContext) -> Reads:
        """Return the parameters that an operator reads in this execution."""
        frame = sys._getframe(1)
        values = context.get_inputs() or () if _is_layer(context["type"]) else ()
        root, index, paths = self._model(frame, values)
        is_read = bool(root)
        if not is_read:
            merged = [array for value in values for array in sources_of(value)]
            root, index, paths = self._model(frame, merged)
        if not root or index is None:
            return Reads({}, dict)
        classes = self._classes.setdefault(root, {})
        for module, _, _ in self._running(frame):
            own = self.path_of(module)
            path = paths.get(id(module)) if own is None else own
            if path is not None:
                classes[path] = type(module).__name__
        place = self.place(frame)

        def current(owner: str, value: Any) -> Callable[[], Any]:
            return self.arrays.of(owner, value, frame, place is not None)

        # Iterations of a loop that is executed are one op.
        varies = place is None and LOCAL.loop is None and not _is_transformed()
        finder = ImmutableParameters(self._origin_of, current, varies)
        reads = finder.reads(context, root, index, classes)
        return reads if is_read or reads.computed else Reads({}, dict)

    def reads_any(self, frame: FrameType | None, values: Sequence[Any]) -> bool:
        """Return True if a value is a parameter of the model that runs, or a part of one."""
        return bool(self._parts(frame, values)[1])

    def layer_of(self, frame: FrameType | None, values: Sequence[Any]) -> str:
        """Return a label of the parameters among values, as for `Traced.layer`; empty if none are.

        Args:
            frame: The frame at which the model that runs is looked for.
            values: The arguments of a function, which may be called for each layer.
        """
        root, parts = self._parts(frame, values)
        if not parts:
            return ""
        paths = zip(*(name.split(".") for _, name, _ in parts), strict=False)
        common = [names[0] for names in paths if len({*names}) == 1]
        indices = [str(place) for place in parts[0][2] if isinstance(place, int)]
        name = f"{root}:{'.'.join(common)}" + (f"[{','.join(indices)}]" if indices else "")
        return self._number(name, parts)

    def _parts(
        self, frame: FrameType | None, values: Sequence[Any]
    ) -> tuple[str, list[tuple[int, str, Sequence[int | range]]]]:
        """Return the label of the model that runs, and of which parameters values are parts.

        A part is the number of the value, the parameter's name and the indices along its axes.
        """
        root, index, _ = self._model(frame, values)
        names = {} if index is None else index.names
        shown = [None if value is None else self._origin_of(value) for value in values]
        return root, [
            (number, names[id(one.source)], one.places)
            for number, one in enumerate(shown)
            if one is not None and id(one.source) in names
        ]

    def _model(
        self, frame: FrameType | None, values: Sequence[Any]
    ) -> tuple[str, ParameterIndex | None, Mapping[int, str]]:
        """Return the label of the model that runs, its parameters and its modules' paths.

        Args:
            frame: The frame at which it is looked for.
            values: Values of which some may be parameters.
        """
        place = self.place(frame)
        if place is not None:
            found, paths = self.contents_of(self._root)
            return place.root, self._indices.of(found), paths
        wanted = self._sources(values)
        for tree in parameter_trees(frame, self._counts) if wanted else ():
            index = self._indices.of(tree)
            if not wanted.isdisjoint(index.names):
                return self._number(_PLAIN, index.structure), index, {}
            if not _is_transformed():
                break  # What functions get that are executed may be computed.
        return "", None, {}

    def _sources(self, values: Sequence[Any]) -> set[int]:
        return {id(self._origin_of(value).source) for value in values if value is not None}

    def _whole(self, parameter: Any) -> Any:
        """Return the array of which a parameter is a copy in another dtype, a part, or itself."""
        seen = self._origin_of(parameter)
        axes = [axis for axis in seen.axes if axis is not None]
        return seen.source if axes == sorted(axes) else parameter

    def _running(self, frame: FrameType | None) -> Iterator[tuple[Any, FrameType, str]]:
        for owner, around in methods_around(frame, self._counts):
            library = self.library_of(owner, around.f_code.co_name)
            if library:
                yield owner, around, library

    def _register(self, root: Any) -> tuple[str, Mapping[int, str]]:
        parameters, paths = self.contents_of(root)
        label = self._label(type(root).__qualname__, parameters)
        self._models.set(root, (label, paths))
        for name, value in parameters.items():
            self.arrays.registered(f"{label}:{name}", value)
        return label, paths

    def _variable_of(self, array: Any, frame: FrameType | None) -> Any:
        """Return the variable that has an array, and that functions around a frame got.

        Returns:
            The variable; None if there is none.
        """
        seen: set[int] = set()
        while frame is not None:
            for value in arguments_of(frame) if self._counts(frame.f_code) else ():
                if id(value) not in seen:
                    seen.add(id(value))
                    if (found := self.variables_of(value).get(id(array))) is not None:
                        return found
            frame = frame.f_back
        return None

    def _label(self, name: str, parameters: Mapping[str, Any]) -> str:
        return self._number(name, [(path, value.shape) for path, value in parameters.items()])

    def _number(self, name: str, structure: Any) -> str:
        """Return a name, with a number if others of the name have another structure."""
        same = self._structures.setdefault(name, [])
        if structure not in same:
            same.append(structure)
        number = same.index(structure) + 1
        return name if number == 1 else f"{name}#{number}"


def _copy(counts: Any) -> Any:
    return {k: _copy(v) for k, v in counts.items()} if isinstance(counts, dict) else counts


def _restore(counts: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    """Write the numbers of `before` into nested dictionaries, which others hold."""
    for key in counts.keys() - before.keys():
        del counts[key]
    for key, value in before.items():
        if isinstance(value, dict):
            _restore(counts[key], value)
        else:
            counts[key] = value


def _is_transformed() -> bool:
    return LOCAL.trace is not None or not internals.is_top_level()


def _is_layer(op_type: str | None) -> bool:
    return op_type is not None and (op_type in _LAYERS or op_type.startswith("conv"))
