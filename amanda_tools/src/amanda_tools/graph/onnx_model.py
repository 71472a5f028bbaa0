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
from amanda_tools.output.extras import require
from amanda_tools.output.folders import whole_file
from amanda_tools.tensors.types import Position, TensorType

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
    helper = require("onnx.helper", "onnx")
    onnx = require("onnx", "onnx")
    kept = {op.index for op in (*graph.ops, *(graph.backward_ops if backward else ()))}
    calls = {source.index for source in graph.sources if source.kind == "call"}
    edges = [e for e in graph.edges if not e.back and e.consumer in kept | calls]
    kept |= {edge.producer for edge in edges if isinstance(graph.nodes[edge.producer], Source)}
    edges = [edge for edge in edges if edge.producer in kept and edge.consumer in kept]
    into: dict[int, list[Edge]] = {}
    read: dict[int, set[int | None]] = {}
    for edge in edges:
        into.setdefault(edge.consumer, []).append(edge)
        read.setdefault(edge.producer, set()).add(edge.output)
    order = TopologicalSorter(
        {node: [edge.producer for edge in into.get(node, ())] for node in sorted(kept)}
    )
    nodes: list[Any] = []
    inputs: list[Any] = []
    values: list[Any] = []
    ends: list[Any] = []
    for index in order.static_order():
        node = graph.nodes[index]
        taken = [_value(graph, edge.producer, edge.output) for edge in into.get(index, ())]
        if isinstance(node, Source) and node.kind != "call":
            info = _info(helper, onnx, _value(graph, index, 0), node.tensor)
            if info is not None:
                inputs.append(info)
                continue
        types = dict(enumerate(node.outputs)) if isinstance(node, Op) else {}
        positions = read.get(index, set()) | types.keys()
        # Values that were written but not returned come last.
        ordered = sorted(positions, key=lambda position: (position is None, position))
        outputs = [_value(graph, index, position) for position in ordered]
        for position, tensor in types.items():
            info = _info(helper, onnx, _value(graph, index, position), tensor)
            if info is not None:
                (values if position in read.get(index, ()) else ends).append(info)
        name = node.type if isinstance(node, Op) else node.kind
        made = helper.make_node(name, taken, outputs, name=node.name, domain=DOMAIN)
        for key, value in _attributes(graph, node):
            made.attribute.append(helper.make_attribute(key, value))
        nodes.append(made)
    body = helper.make_graph(nodes, graph.namespace, inputs, ends, value_info=values)
    return helper.make_model(
        body,
        producer_name="amanda",
        opset_imports=[helper.make_opsetid(DOMAIN, 1), helper.make_opsetid("", 21)],
        ir_version=10,
    )


def _value(graph: Graph, index: int, output: int | None) -> str:
    node = graph.nodes[index]
    if isinstance(node, Source) and node.kind != "call":
        return f"{node.name}:{index}"  # Names need not be unique.
    return f"{index}:{'written' if output is None else output}"


def _info(helper: Any, onnx: Any, name: str, tensor: Position) -> Any:
    """Return ONNX's description of a value, or None if ONNX cannot describe it."""
    if not isinstance(tensor, TensorType) or tensor.shape is None:
        return None
    kind = getattr(onnx.TensorProto, _CODES.get(tensor.dtype, tensor.dtype.upper()), None)
    if not isinstance(kind, int):
        return None
    shape = ["?" if size is None else size for size in tensor.shape]
    return helper.make_tensor_value_info(name, kind, shape)


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
