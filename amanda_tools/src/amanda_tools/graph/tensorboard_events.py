"""Graphs as TensorBoard event files, for its graph page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from amanda_tools.graph.model import Graph, Node, Op
from amanda_tools.kit.output.extras import require
from amanda_tools.kit.output.folders import whole_file
from amanda_tools.kit.tensors.types import Position, TensorType

__all__ = ["graph_def", "write"]


def write(graph: Graph, folder: Path) -> None:
    """Write an event file into a folder, which is a TensorBoard run.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """
    # TensorBoard's own event writer would load TensorFlow if it is installed.
    records = require("tensorboard.summary.writer.record_writer", "tensorboard")
    proto = require("tensorboard.compat.proto.event_pb2", "tensorboard")
    folder.mkdir(exist_ok=True)
    path = folder / "events.out.tfevents.0.amanda"
    with whole_file(path) as new, new.open("wb") as file:
        writer = records.RecordWriter(file)
        for event in (
            proto.Event(file_version="brain.Event:2"),
            proto.Event(graph_def=graph_def(graph).SerializeToString()),
        ):
            writer.write(event.SerializeToString())


def graph_def(graph: Graph) -> Any:
    """Return a graph as TensorFlow's ``GraphDef``, with modules as scopes.

    TensorBoard's page needs graphs without cycles, so values that an earlier operator reads are
    left out.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """
    graphs = require("tensorboard.compat.proto.graph_pb2", "tensorboard")
    versions = require("tensorboard.compat.proto.versions_pb2", "tensorboard")
    names: dict[int, str] = {}
    taken: set[str] = set()
    for node in graph.nodes:
        names[node.index] = name = _unused(_scoped(graph, node), taken)
        taken.add(name)
    result = graphs.GraphDef(versions=versions.VersionDef(producer=22))
    for node in graph.nodes:
        entry = result.node.add(name=names[node.index], op=_type(node))
        for edge in graph.edges_into(node):
            if not edge.back:
                end = f":{edge.output}" if edge.output else ""
                entry.input.append(names[edge.producer] + end)
        facts = _facts(node)
        for key, value in facts.items():
            entry.attr[key].s = value.encode("utf-8", "replace")
        shapes = [_shape_of(value) for value in node.outputs] if isinstance(node, Op) else []
        if any(shape is not None for shape in shapes):
            listed = entry.attr["_output_shapes"].list
            for shape in shapes:
                one = listed.shape.add(unknown_rank=shape is None)
                for size in shape or ():
                    one.dim.add(size=-1 if size is None else size)
    return result


def _type(node: Node) -> str:
    return node.type if isinstance(node, Op) else node.kind


def _scoped(graph: Graph, node: Node) -> str:
    if not isinstance(node, Op):
        parts = [node.kind, *node.name.split("/")]
    else:
        home = graph.forward_of(node) or node
        parts = [*home.module.replace(".", "/").split("/"), node.name.rpartition("/")[2]]
        if node.is_backward:
            parts.insert(0, "gradients")
    cleaned = ("".join(c if c.isalnum() or c in "_.-" else "_" for c in part) for part in parts)
    return "/".join(part for part in cleaned if part) or "op"


def _unused(name: str, taken: set[str]) -> str:
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


def _facts(node: Node) -> dict[str, str]:
    if not isinstance(node, Op):
        return {"tensor": str(node.tensor or ""), "name": node.name}
    facts = {"type": node.type, "word": node.word, "source": node.source, "zone": node.zone}
    facts["executions"] = None if node.executions is None else str(node.executions)
    found = {key: value for key, value in facts.items() if value}
    found.update((f"note: {key}", str(value)) for key, value in node.notes.items())
    return {**found, **node.arguments}


def _shape_of(value: Position) -> tuple[int | None, ...] | None:
    return value.shape if isinstance(value, TensorType) else None
