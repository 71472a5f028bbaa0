"""The graphs behind functions: which one a name means, and which graphs differentiate another.

Owns the names under which TensorFlow registers functions, as far as it does not keep their graphs.
"""

from __future__ import annotations

import weakref
from typing import Any

from amanda_core.driver_kit import WeakGroup
from amanda_driver_tf.graphs.records import Records
from amanda_driver_tf.tensorflow_internals.modules import func_graph as func_graph_module
from amanda_driver_tf.tensorflow_internals.objects import (
    forget_gradients,
    functions_of,
    graph_of_concrete,
    graph_of_function,
)

__all__ = [
    "GRAPHS",
    "children_of",
    "drop_unrecorded_gradients",
    "graph_of",
    "name_graph",
    "name_of",
]

#: Name of a function -> the graph it was made from, while that is alive.
GRAPHS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_CHILDREN = "_amanda_gradients"
_NAME = "_amanda_name"
_RECORDED = "_amanda_heard"


def _children(graph: Any) -> WeakGroup[Any]:
    found: WeakGroup[Any] | None = getattr(graph, _CHILDREN, None)
    if found is None:
        found = WeakGroup()
        setattr(graph, _CHILDREN, found)
    return found


def children_of(graph: Any) -> list[Any]:
    """Return the graphs of gradients built for a function graph that are still alive."""
    return list(getattr(graph, _CHILDREN, ()))


def name_of(graph: Any) -> str:
    """Return the name of the last function that was made from a graph."""
    return str(getattr(graph, _NAME))


def graph_of(name: str, outer: Any = None) -> Any:
    """Return the graph that a function was made from, or None if that is not known.

    Args:
        name: The function.
        outer: The graph of a function that calls it, for functions made before the recorder was
            installed.
    """
    graph = GRAPHS.get(name)
    while graph is None and outer is not None:
        graph = graph_of_function(functions_of(outer).get(name))
        if graph is not None:
            GRAPHS[name] = graph
        outer = getattr(outer, "outer_graph", None)
    return graph


def drop_unrecorded_gradients(function: Any) -> None:
    """Drop a ConcreteFunction's gradients if they were built without the recorder."""
    graph = graph_of_concrete(function)
    if getattr(graph, _RECORDED, False):
        return
    setattr(graph, _RECORDED, True)
    if any(Records.of(child) is not None for child in children_of(graph)):
        return
    forget_gradients(function)


def name_graph(name: str, graph: Any) -> None:
    """Remember that the function `name` was made from a graph."""
    GRAPHS[name] = graph
    setattr(graph, _NAME, name)
    found = Records.of(graph)
    if found is not None:
        # Gradients capture the forward values that they need, which may be none.
        sources = [getattr(outer, "graph", None) for outer, _ in graph.captures]
        for source in (*sources, *(made.forward.graph for made in found.records)):
            if isinstance(source, func_graph_module.FuncGraph) and source is not graph:
                _children(source).add(graph)
