"""Graphs as JSON: writing and reading.

Defines the format ``amanda.graph/1``, which ``docs/tools/graph.schema.json`` describes. Reading
executes nothing and trusts nothing: a malformed file raises an error that says where it is
malformed.
"""

from __future__ import annotations

import functools
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from amanda_core.errors import ResultError
from amanda_core.results import tables as results
from amanda_tools.graph.model import Edge, Graph, Op, Source
from amanda_tools.kit.output.rendering import fields_of

__all__ = ["FORMAT", "from_json", "load", "to_json"]

FORMAT = "amanda.graph/1"
_KINDS = {"op": Op, "source": Source}


def to_json(graph: Graph) -> dict[str, Any]:
    """Return a graph as an object that `render_json` accepts."""
    edges = list(graph.edges)  # Before the nodes, which may be added meanwhile.
    return {
        "namespace": graph.namespace,
        "nodes": [
            {"node": "op" if isinstance(node, Op) else "source", **fields_of(node)}
            for node in tuple(graph.nodes)
        ],
        "edges": edges,
    }


def load(path: Path) -> list[Graph]:
    """Read the graphs from a file that the tool ``graph`` wrote.

    Raises:
        ResultError: The file cannot be read, or does not contain graphs.
    """
    data = results.load(path)
    try:
        return from_json(data)
    except ResultError as error:
        raise ResultError(error.what, where=results.printable(path), fix=error.fix) from None


def from_json(data: Any) -> list[Graph]:
    """Return the graphs in the parsed content of such a file.

    Raises:
        ResultError: The content is malformed.
    """
    found = _of(dict[str, Any], data, "the file")
    if found.get("format") != FORMAT:
        raise _problem("format", f"is {found.get('format')!r:.60}, not {FORMAT!r}")
    graphs = _of(list[dict[str, Any]], found.get("graphs"), "graphs")
    return [_graph(graph, f"graphs[{number}]") for number, graph in enumerate(graphs)]


def _graph(data: dict[str, Any], where: str) -> Graph:
    graph = Graph(_of(str, data.get("namespace"), f"{where}.namespace"))
    nodes = _of(list[dict[str, Any]], data.get("nodes"), f"{where}.nodes")
    edges = _of(list[dict[str, Any]], data.get("edges"), f"{where}.edges")
    for number, facts in enumerate(nodes):
        at = f"{where}.nodes[{number}]"
        kind = facts.get("node")
        if kind not in ("op", "source"):
            raise _problem(f"{at}.node", "is neither 'op' nor 'source'")
        node = _of(_KINDS[kind], {k: v for k, v in facts.items() if k != "node"}, at)
        if node.index != number:
            raise _problem(f"{at}.index", f"is {node.index}, not {number}")
        graph.add(node)
    for number, node in enumerate(graph.nodes):
        if isinstance(node, Op) and node.forward is not None:
            at = f"{where}.nodes[{number}].forward"
            if not (
                0 <= node.forward < len(graph.nodes) and isinstance(graph.nodes[node.forward], Op)
            ):
                raise _problem(at, f"is {node.forward}, which is not an operator")
    for number, facts in enumerate(edges):
        at = f"{where}.edges[{number}]"
        edge = _of(Edge, facts, at)
        for name in ("producer", "consumer"):
            if not 0 <= getattr(edge, name) < len(graph.nodes):
                raise _problem(f"{at}.{name}", f"is {getattr(edge, name)}, which is not a node")
        graph.connect(edge)
    return graph


def _of(kind: Any, value: Any, where: str) -> Any:
    """Convert `value` to `kind`, which is a plain type, a dataclass or a simple generic."""
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _instance(kind, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value not in arguments:
            raise _problem(where, f"is {value!r:.60}, not one of {', '.join(arguments)}")
        return value
    if origin in (types.UnionType, typing.Union):
        # Check against the alternative of the same form, so that the error is about that one.
        for one in arguments:
            form = dict if is_dataclass(one) else typing.get_origin(one) or one
            if type(value) is (list if form is tuple else form):
                return _of(one, value, where)
        names = ", ".join(map(_name, arguments))
        raise _problem(where, f"is {type(value).__name__}, not one of {names}")
    if origin is list and isinstance(value, list):
        return [_of(arguments[0], item, f"{where}[{n}]") for n, item in enumerate(value)]
    if origin is tuple and isinstance(value, list):
        kinds = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        if len(value) == len(kinds):
            items = zip(kinds, value, strict=True)
            return tuple(_of(one, item, f"{where}[{n}]") for n, (one, item) in enumerate(items))
    if origin is dict and isinstance(value, dict):
        return {key: _of(arguments[1], item, f"{where}.{key:.60}") for key, item in value.items()}
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise _problem(where, f"is {type(value).__name__}, not {_name(kind)}")


def _instance(kind: Any, value: Any, where: str) -> Any:
    facts = _of(dict[str, Any], value, where)
    hints = _hints(kind)
    names = {field.name for field in fields(kind)}
    unknown = sorted(facts.keys() - names)
    if unknown:
        raise _problem(where, f"has {unknown[0]!r:.60}, which {kind.__name__} does not have")
    for field in fields(kind):
        required = field.default is MISSING and field.default_factory is MISSING
        if required and field.name not in facts:
            raise _problem(where, f"lacks {field.name!r}")
    return kind(**{n: _of(hints[n], item, f"{where}.{n}") for n, item in facts.items()})


_hints = functools.cache(typing.get_type_hints)


def _name(kind: Any) -> str:
    return str(getattr(typing.get_origin(kind) or kind, "__name__", kind))


def _problem(where: str, text: str) -> ResultError:
    return ResultError(
        f"The graph cannot be read: {results.printable(where)} {results.printable(text)}",
        fix=f"Give a file that the tool 'graph' wrote ({FORMAT})",
    )
