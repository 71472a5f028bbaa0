"""Ops that a graph has and does not show.

Owns what a `tf.Graph` answers once it holds hidden ops: names, lists, counts, serialised forms and
consumers are those of the graph as its owner built it. TensorFlow cannot delete ops from a graph;
hidden ones stay, cost nothing when they are not run, and nobody meets them: other threads, which
ask under the graph's lock, wait while some are being added.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tensorflow.python.framework import ops

__all__ = ["Hidden", "all_hidden", "hide_consumers", "hiding", "prepare"]

_ATTRIBUTE = "_amanda_hidden"
_GRAPHS: weakref.WeakSet[Any] = weakref.WeakSet()


class Hidden:
    """What one graph hides.

    Attributes:
        names: Names of the ops.
        functions: Names of functions in its library.
        open: More than 0 while the driver looks at the whole.
    """

    def __init__(self, graph: ops.Graph) -> None:
        self.names: set[str] = set()
        self.functions: set[str] = set()
        #: Names of its functions, in their order before hidden ones came between them.
        self.order = [f.signature.name for f in graph.as_graph_def().library.function]
        self.open = 0
        #: As they were before the first op was hidden; functions raise the oldest reader's version.
        self.versions = graph.graph_def_versions

    @classmethod
    def of(cls, graph: Any) -> Hidden | None:
        """What a graph hides, or None."""
        return getattr(graph, _ATTRIBUTE, None)


def all_hidden() -> list[Hidden]:
    """What the graphs that are alive hide."""
    return [hidden for graph in list(_GRAPHS) if (hidden := Hidden.of(graph)) is not None]


class _Hiding:
    """Answers of a graph with hidden ops. Mixed into the graph's own class."""

    _amanda_hidden: Hidden
    _lock: Any

    def get_operations(self) -> list[Any]:
        hidden = self._amanda_hidden
        with self._lock:
            found: list[Any] = super().get_operations()  # type: ignore[misc]
            return found if hidden.open else [op for op in found if op.name not in hidden.names]

    def num_operations(self) -> int:
        with self._lock:
            count = int(super().num_operations())  # type: ignore[misc]
            return count if self._amanda_hidden.open else count - len(self._amanda_hidden.names)

    @property
    def version(self) -> int:
        with self._lock:
            number = int(super().version)  # type: ignore[misc]
            return number if self._amanda_hidden.open else number - len(self._amanda_hidden.names)

    def _get_operation_by_name(self, name: str) -> Any:
        hidden = self._amanda_hidden
        with self._lock:
            if name in hidden.names and not hidden.open:
                raise KeyError(f"The name '{name}' refers to an Operation not in the graph.")
            return super()._get_operation_by_name(name)  # type: ignore[misc]

    def _is_function(self, name: str) -> bool:
        hidden = self._amanda_hidden
        with self._lock:
            if name in hidden.functions and not hidden.open:
                return False
            return bool(super()._is_function(name))  # type: ignore[misc]

    def _as_graph_def(self, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        with self._lock:
            return self._shown(*args, **kwargs)

    def _shown(self, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        hidden = self._amanda_hidden
        hidden.open += 1
        try:
            whole, _ = super()._as_graph_def(*args, **kwargs)  # type: ignore[misc]
        finally:
            hidden.open -= 1
        # In place: what stays keeps its bytes.
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
        _CLASSES[kind] = type(kind.__name__, (_Hiding, kind), {"__module__": kind.__module__})
    return _CLASSES[kind]


def prepare(graph: Any) -> Hidden:
    """Have a graph answer for what it will hide; what it hides.

    Some time before something is added: who asked the graph as it was, and waits for its lock, is
    answered before that.
    """
    with graph._lock:
        hidden = Hidden.of(graph)
        if hidden is None:
            hidden = Hidden(graph)
            setattr(graph, _ATTRIBUTE, hidden)
            graph.__class__ = _hiding_class(type(graph))
            _GRAPHS.add(graph)
        return hidden


@contextmanager
def hiding(graph: Any) -> Iterator[Hidden]:
    """Extent in which what is added to a graph is hidden, and a finalized one accepts it."""
    with graph._lock:
        hidden = prepare(graph)
        with _adding(graph, hidden):
            yield hidden


@contextmanager
def _adding(graph: Any, hidden: Hidden) -> Iterator[None]:
    names, functions = dict(graph._names_in_use), dict(graph._functions)
    collections = {name: list(graph._collections[name]) for name in graph._collections}
    count = ops.Graph.num_operations(graph)
    finalized = graph.finalized
    if finalized:
        graph._unsafe_unfinalize()
    hidden.open += 1
    try:
        with _outside_scopes(graph):
            yield
    finally:
        hidden.open -= 1
        if finalized:
            graph.finalize()
        for op in _all_operations(graph)[count:]:
            hidden.names.add(op.name)
        hidden.functions.update(set(graph._functions) - set(functions))
        graph._names_in_use.clear()
        graph._names_in_use.update(names)
        for name in list(graph._collections):
            if name in collections:
                graph._collections[name][:] = collections[name]
            else:
                del graph._collections[name]


@contextmanager
def _outside_scopes(graph: Any) -> Iterator[None]:
    """Extent in which no scope that is open in the user's program touches new ops."""
    state = ("_attr_scope_map", "_op_to_kernel_label_map", "_gradient_override_map")
    before = {name: getattr(graph, name) for name in state}
    stack, flow = graph._name_stack, graph._get_control_flow_context()
    for name in state:
        setattr(graph, name, {})
    graph._name_stack = ""
    graph._set_control_flow_context(None)
    try:
        with (
            graph.as_default(),
            graph.control_dependencies(None),
            graph.colocate_with(None, ignore_existing=True),
            graph.device(None),
        ):
            yield
    finally:
        graph._set_control_flow_context(flow)
        graph._name_stack = stack
        for name, value in before.items():
            setattr(graph, name, value)


def _all_operations(graph: Any) -> list[Any]:
    return list(ops.Graph.get_operations(graph))


def hide_consumers(tensor: Any, hidden: Hidden) -> None:
    """Have a tensor that hidden ops read name only its other readers."""
    if "consumers" in tensor.__dict__:
        return
    original = type(tensor).consumers

    def consumers() -> list[Any]:
        with tensor.graph._lock:
            found = original(tensor)
            return [op for op in found if hidden.open or op.name not in hidden.names]

    tensor.consumers = consumers
