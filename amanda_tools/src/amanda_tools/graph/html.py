"""Graphs as one HTML page that needs no network: a canvas of boxes, search, and details.

The styles and scripts are in ``page/``. Text from the program enters the page only as data. Each
text and each tensor type stands there once, so that a graph of thousands of operators stays small.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from amanda_tools.graph.model import Edge, Graph, Node, Op
from amanda_tools.kit.page.composition import Parts, compose, part
from amanda_tools.kit.page.libraries import library
from amanda_tools.kit.tensors.types import Position, TensorType

__all__ = ["PARTS", "page"]

_SCRIPTS = (
    *("data", "tree", "fold", "layout", "measures", "search", "view", "canvas", "details"),
    *("place", "exporting", "page"),
)
#: Styles and scripts of the canvas, which another page can contain.
PARTS = Parts(
    (part(__package__, "page/page.css"),),
    (library("dagre"), *(part(__package__, f"page/{name}.js") for name in _SCRIPTS)),
)


def page(graphs: Sequence[Graph]) -> str:
    """Return the page for these graphs, as HTML."""
    body = part(__package__, "page/page.html")
    return compose("Graph", body, PARTS, {"graphs": [packed(graph) for graph in graphs]})


def packed(graph: Graph) -> dict[str, Any]:
    """Return a graph as the rows that ``page/data.js`` reads."""
    texts, types = _Table(), _Table()
    # Edges first: the graph may grow, and then has nodes that the edges do not need.
    edges = [number for edge in tuple(graph.edges) for number in _edge(edge)]
    nodes = [_node(node, texts, types) for node in tuple(graph.nodes)]
    return {
        "namespace": graph.namespace,
        "nodes": nodes,
        "edges": edges,
        "texts": list(texts.numbers),
        "types": [types.values[key] for key in types.numbers],
    }


class _Table:
    """Values by number, from 0 on; equal ones have one number, and None has -1.

    Attributes:
        numbers: Key of a value -> its number, in order.
        values: Key of a value -> the value; None where the key is the value.
    """

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.values: dict[Hashable, Any] = {}

    def number(self, key: Hashable, value: Any = None) -> int:
        """Return the number of a value; a new key gets the next number.

        Args:
            key: Identifies the value, such as a text that is its own key. None has the number -1.
            value: The value to keep for a new key, if the key is not enough. It is ignored for a
                known key.
        """
        if key is None:
            return -1
        if key not in self.numbers:
            self.numbers[key] = len(self.numbers)
            self.values[key] = value
        return self.numbers[key]


def _node(node: Node, texts: _Table, types: _Table) -> list[Any]:
    text = texts.number
    if not isinstance(node, Op):
        tensor = _type(node.tensor, types)
        return [text(node.kind), text(node.name), tensor, text(node.program)]
    notes = {
        name: [text(value)] if isinstance(value, str) else value
        for name, value in tuple(node.notes.items())
    }
    return [
        *map(text, (node.name, node.type, node.word, node.module, node.source)),
        text(str(node.id)),  # Too large for JavaScript's numbers.
        *map(text, (node.zone, node.program)),
        -1 if node.forward is None else node.forward,
        int(node.is_backward),
        node.executions,
        [text(name) for name in node.input_names],
        [_type(tensor, types) for tensor in node.inputs],
        [_type(tensor, types) for tensor in node.outputs],
        _pairs({name: text(value) for name, value in node.arguments.items()}, texts),
        _pairs(notes, texts),
    ]


def _pairs(values: Mapping[str, Any], texts: _Table) -> list[Any]:
    return [item for name, value in values.items() for item in (texts.number(name), value)]


def _type(position: Position, types: _Table) -> int:
    value = _plain(position)
    return types.number(None if value is None else repr(value), value)


def _plain(position: Position) -> Any:
    if position is None:
        return None
    if isinstance(position, TensorType):
        shape = None if position.shape is None else list(position.shape)
        return {"dtype": position.dtype, "shape": shape}
    return [_plain(item) for item in position]


def _edge(edge: Edge) -> Iterable[int]:
    flags = (edge.kind == "alias") + 2 * edge.back
    places = (edge.output, edge.consumer, edge.input, edge.item)
    return (edge.producer, *(-1 if one is None else one for one in places), flags, edge.first)
