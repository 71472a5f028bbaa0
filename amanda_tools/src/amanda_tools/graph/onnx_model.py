"""Graphs as ONNX files for viewers such as Netron.

The file is only a container and cannot be run: its operators are of a domain of their own, and it
has no weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from amanda_tools.graph.model import Edge, Graph, Op, Source
from amanda_tools.kit.output.extras import require
from amanda_tools.kit.output.folders import whole_file
from amanda_tools.kit.tensors.types import Position, TensorType

__all__ = ["DOMAIN", "model", "write", "write_both"]

DOMAIN = "amanda"


def write(graph: Graph, path: Path) -> None:
    """Write the forward operators of a graph as an ONNX file.

    Raises:
        MissingExtraError: onnx is not installed.
    """
    _save(model(graph), path)


def write_both(graph: Graph, path: Path) -> None:
    """Write the forward and the backward operators of a graph as an ONNX file.

    Raises:
        MissingExtraError: onnx is not installed.
    """
    _save(model(graph, backward=True), path)


def _save(content: Any, path: Path) -> None:
    with whole_file(path) as new:
        require("onnx", "onnx").save(content, str(new))


def model(graph: Graph, backward: bool = False) -> Any:
    """Return a graph as an `onnx.ModelProto`.

    ONNX has no cycles, so values that an earlier operator reads are left out.

    Args:
        graph: The graph.
        backward: Include the backward operators. Each names its forward operator in an attribute,
            because no value passes between them.

    Raises:
        MissingExtraError: onnx is not installed.
    """
    return _Model(graph, backward).made()


class _Model:
    """A graph as ONNX: what is kept of it, and the parts that are made of that so far."""

    def __init__(self, graph: Graph, backward: bool) -> None:
        self._graph = graph
        self._helper = require("onnx.helper", "onnx")
        self._onnx = require("onnx", "onnx")
        kept = {op.index for op in (*graph.ops, *(graph.backward_ops if backward else ()))}
        calls = {source.index for source in graph.sources if source.kind == "call"}
        edges = [e for e in graph.edges if not e.back and e.consumer in kept | calls]
        kept |= {edge.producer for edge in edges if isinstance(graph.nodes[edge.producer], Source)}
        self._kept = kept
        #: Consumer -> the edges into it, and producer -> the positions that are read.
        self._into: dict[int, list[Edge]] = {}
        self._read: dict[int, set[int | None]] = {}
        for edge in edges:
            if edge.producer in kept and edge.consumer in kept:
                self._into.setdefault(edge.consumer, []).append(edge)
                self._read.setdefault(edge.producer, set()).add(edge.output)
        self._nodes: list[Any] = []
        self._inputs: list[Any] = []
        self._values: list[Any] = []
        self._ends: list[Any] = []

    def made(self) -> Any:
        """Return the model."""
        into = {n: [edge.producer for edge in self._into.get(n, ())] for n in sorted(self._kept)}
        for index in TopologicalSorter(into).static_order():
            node = self._graph.nodes[index]
            if isinstance(node, Op) or not self._add_input(index, node):
                self._add_node(index, node)
        make, version = self._helper.make_graph, self._helper.make_opsetid
        ends, values = self._ends, self._values
        body = make(self._nodes, self._graph.namespace, self._inputs, ends, value_info=values)
        return self._helper.make_model(
            body,
            producer_name="amanda",
            opset_imports=[version(DOMAIN, 1), version("", 21)],
            ir_version=10,
        )

    def _add_input(self, index: int, source: Source) -> bool:
        """Add a source as an input of the model; return False if ONNX cannot describe it."""
        info = None if source.kind == "call" else self._info(index, 0, source.tensor)
        if info is not None:
            self._inputs.append(info)
        return info is not None

    def _add_node(self, index: int, node: Op | Source) -> None:
        """Add an operator, or another node that is none of the inputs, and its values."""
        taken = [_value(self._graph, e.producer, e.output) for e in self._into.get(index, ())]
        types = dict(enumerate(node.outputs)) if isinstance(node, Op) else {}
        read = self._read.get(index, set())
        # Values that were written but not returned come last.
        ordered = sorted(read | types.keys(), key=lambda position: (position is None, position))
        outputs = [_value(self._graph, index, position) for position in ordered]
        for position, tensor in types.items():
            info = self._info(index, position, tensor)
            if info is not None:
                (self._values if position in read else self._ends).append(info)
        kind = node.type if isinstance(node, Op) else node.kind
        made = self._helper.make_node(kind, taken, outputs, name=node.name, domain=DOMAIN)
        for key, value in _attributes(self._graph, node):
            made.attribute.append(self._helper.make_attribute(key, value))
        self._nodes.append(made)

    def _info(self, index: int, output: int | None, tensor: Position) -> Any:
        """Return ONNX's description of a value, or None if ONNX cannot describe it."""
        if not isinstance(tensor, TensorType) or tensor.shape is None:
            return None
        code = _CODES.get(tensor.dtype, tensor.dtype.upper())
        kind = getattr(self._onnx.TensorProto, code, None)
        if not isinstance(kind, int):
            return None
        shape = ["?" if size is None else size for size in tensor.shape]
        name = _value(self._graph, index, output)
        return self._helper.make_tensor_value_info(name, kind, shape)


def _value(graph: Graph, index: int, output: int | None) -> str:
    node = graph.nodes[index]
    if isinstance(node, Source) and node.kind != "call":
        return f"{node.name}:{index}"  # Names need not be unique.
    return f"{index}:{'written' if output is None else output}"


#: Dtypes with another name in ONNX.
_CODES = {"float32": "FLOAT", "float64": "DOUBLE"}


def _attributes(graph: Graph, node: Op | Source) -> Iterator[tuple[str, str]]:
    if not isinstance(node, Op):
        return
    forward = graph.forward_of(node)
    if forward is not None:
        yield "forward", forward.name
    for key in ("name", "module", "source", "word", "zone"):
        if getattr(node, key):
            yield key, getattr(node, key)
    if node.executions is not None:
        yield "executions", str(node.executions)
    yield from ((f"argument {key}", value) for key, value in node.arguments.items())
    yield from ((f"note {key}", str(value)) for key, value in node.notes.items())
