"""Hidden ops: ops that a graph contains and does not show.

Owns what a `tf.Graph` with hidden ops answers. Names, lists, counts, serialized forms and consumers
are those of the graph as its owner built it. TensorFlow cannot delete ops from a graph, so hidden
ops stay; they cost nothing when they are not run. Other threads, which query the graph under its
lock, wait while ops are being added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from amanda_core.driver_kit import WeakGroup
from amanda_driver_tf.tensorflow_internals.modules import ops
from amanda_driver_tf.tensorflow_internals.objects import (
    AS_GRAPH_DEF,
    NAME_STACK,
    OPERATION_BY_NAME,
    SCOPE_MAPS,
    as_graph_def,
    collections_of,
    control_flow_context,
    functions_of,
    lock_of,
    names_in_use,
    operation_by_name,
    reopen,
    set_control_flow_context,
)

__all__ = ["Hidden", "all_hidden", "hide_consumers", "hiding", "prepare"]

_ATTRIBUTE = "_amanda_hidden"
_GRAPHS: WeakGroup[Any] = WeakGroup()


class Hidden:
    """The nodes that one graph hides.

    Attributes:
        names: Names of the hidden ops.
        functions: Hidden functions in its library, by name.
        open: More than 0 while the driver needs to see everything.
    """

    def __init__(self, graph: ops.Graph) -> None:
        self.names: set[str] = set()
        self.functions: dict[str, Any] = {}
        #: Names of its functions in their original order, before hidden ones were added.
        self.order = [f.signature.name for f in graph.as_graph_def().library.function]
        self.open = 0
        #: From before the first op was hidden, since functions raise the minimum consumer version.
        self.versions = graph.graph_def_versions

    @classmethod
    def of(cls, graph: Any) -> Hidden | None:
        """Return what a graph hides, or None."""
        return getattr(graph, _ATTRIBUTE, None)


def all_hidden() -> list[Hidden]:
    """Return what each live graph hides."""
    return [hidden for graph in list(_GRAPHS) if (hidden := Hidden.of(graph)) is not None]


class _Hiding:
    """Mixed into the class of a graph with hidden ops, to answer its queries."""

    _amanda_hidden: Hidden

    def get_operations(self) -> list[Any]:
        hidden = self._amanda_hidden
        with lock_of(self):
            found: list[Any] = super().get_operations()  # type: ignore[misc]
            return found if hidden.open else [op for op in found if op.name not in hidden.names]

    def num_operations(self) -> int:
        with lock_of(self):
            count = int(super().num_operations())  # type: ignore[misc]
            return count if self._amanda_hidden.open else count - len(self._amanda_hidden.names)

    @property
    def version(self) -> int:
        with lock_of(self):
            number = int(super().version)  # type: ignore[misc]
            return number if self._amanda_hidden.open else number - len(self._amanda_hidden.names)

    def _found_by_name(self, name: str) -> Any:
        hidden = self._amanda_hidden
        with lock_of(self):
            if name in hidden.names and not hidden.open:
                raise KeyError(f"The name '{name}' refers to an Operation not in the graph.")
            return operation_by_name(super(), name)

    def _definition(self, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        with lock_of(self):
            return self._shown(*args, **kwargs)

    def _shown(self, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        hidden = self._amanda_hidden
        with _functions_shown(self, hidden):
            whole, _ = as_graph_def(super(), *args, **kwargs)
        # In place, so that the serialized form of the rest is unchanged.
        _delete(whole.node, [node.name in hidden.names for node in whole.node])
        functions = whole.library.function
        _delete(functions, [f.signature.name in hidden.functions for f in functions])
        place = {name: number for number, name in enumerate(hidden.order)}
        functions.sort(key=lambda f: place.get(f.signature.name, len(place)))
        if not functions:
            whole.ClearField("library")
            whole.versions.CopyFrom(hidden.versions)
        return whole, self.version


def _delete(items: Any, gone: Sequence[bool]) -> None:
    stop = len(gone)
    while stop:
        start = stop - 1
        while start and gone[start - 1] == gone[stop - 1]:
            start -= 1
        if gone[start]:
            del items[start:stop]
        stop = start


_CLASSES: dict[type, type] = {}


def _hiding_class(kind: type) -> type:
    if kind not in _CLASSES:
        members = {
            "__module__": kind.__module__,
            OPERATION_BY_NAME: _Hiding._found_by_name,
            AS_GRAPH_DEF: _Hiding._definition,
        }
        _CLASSES[kind] = type(kind.__name__, (_Hiding, kind), members)
    return _CLASSES[kind]


def prepare(graph: Any) -> Hidden:
    """Make a graph able to hide ops, and return what it hides.

    Called some time before ops are added, so that other threads which hold the graph's lock for a
    query on its old class are done by then.
    """
    with lock_of(graph):
        hidden = Hidden.of(graph)
        if hidden is None:
            hidden = Hidden(graph)
            setattr(graph, _ATTRIBUTE, hidden)
            graph.__class__ = _hiding_class(type(graph))
            _GRAPHS.add(graph)
        return hidden


@contextmanager
def hiding(graph: Any) -> Iterator[Hidden]:
    """Hide everything added to a graph during this context, even if the graph is finalized."""
    with lock_of(graph):
        hidden = prepare(graph)
        with _adding(graph, hidden):
            yield hidden


@contextmanager
def _adding(graph: Any, hidden: Hidden) -> Iterator[None]:
    names, listed = dict(names_in_use(graph)), collections_of(graph)
    collections = {name: list(items) for name, items in listed.items()}
    count = ops.Graph.num_operations(graph)
    finalized = graph.finalized
    if finalized:
        reopen(graph)
    try:
        with _functions_shown(graph, hidden), _outside_scopes(graph):
            yield
    finally:
        if finalized:
            graph.finalize()
        for op in _all_operations(graph)[count:]:
            hidden.names.add(op.name)
        names_in_use(graph).clear()
        names_in_use(graph).update(names)
        for name in list(listed):
            if name in collections:
                listed[name][:] = collections[name]
            else:
                del listed[name]


@contextmanager
def _functions_shown(graph: Any, hidden: Hidden) -> Iterator[None]:
    """Show a graph's hidden ops and functions during this context, and hide functions added in it.

    Anybody may read the graph's dictionary of functions, so it does not contain them otherwise.
    """
    outermost = not hidden.open
    shown = list(functions_of(graph))
    if outermost:
        functions_of(graph).update(hidden.functions)
    hidden.open += 1
    try:
        yield
    finally:
        hidden.open -= 1
        if outermost:
            functions = functions_of(graph)
            for name in set(functions).difference(shown):
                hidden.functions[name] = functions.pop(name)


@contextmanager
def _outside_scopes(graph: Any) -> Iterator[None]:
    """Keep scopes that are open in the user's program from affecting new ops."""
    before = {name: getattr(graph, name) for name in (*SCOPE_MAPS, NAME_STACK)}
    flow = control_flow_context(graph)
    for name in SCOPE_MAPS:
        setattr(graph, name, {})
    setattr(graph, NAME_STACK, "")
    set_control_flow_context(graph, None)
    try:
        with (
            graph.as_default(),
            graph.control_dependencies(None),
            graph.colocate_with(None, ignore_existing=True),
            graph.device(None),
        ):
            yield
    finally:
        set_control_flow_context(graph, flow)
        for name, value in before.items():
            setattr(graph, name, value)


def _all_operations(graph: Any) -> list[Any]:
    return list(ops.Graph.get_operations(graph))


def hide_consumers(tensor: Any, hidden: Hidden) -> None:
    """Remove hidden ops from the consumers of a tensor."""
    if "consumers" in tensor.__dict__:
        return
    original = type(tensor).consumers

    def consumers() -> list[Any]:
        with lock_of(tensor.graph):
            found = original(tensor)
            return [op for op in found if hidden.open or op.name not in hidden.names]

    tensor.consumers = consumers
