"""Clones: the part of a session's graph that instrumentation changes, built a second time, hidden.

Owns what has to be cloned (whatever depends on a changed node, and old while loops as a whole),
how it is added to the graph, and the reuse of clones: a graph accepts ops only for good, so clones
whose sessions are over are given to the next that needs the same ones.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tensorflow.core.framework import graph_pb2, node_def_pb2

from amanda_core.errors import UnsupportedError
from amanda_driver_tf._graphs.body import Body, Node, Value
from amanda_driver_tf._graphs.frames import ENTERS, Frame, Frames
from amanda_driver_tf._graphs.kernels import keeps_state, kept_as_they_are, refuse_second
from amanda_driver_tf._insertion.definitions import Names, Written, name_of, node_defs
from amanda_driver_tf._insertion.host_functions import HostFunction
from amanda_driver_tf._insertion.nodes import Inlined, New
from amanda_driver_tf._sessions.fingerprint import fingerprint
from amanda_driver_tf._sessions.hiding import hide_consumers, hiding
from amanda_driver_tf._tensorflow_internals.modules import importer
from amanda_driver_tf._tensorflow_internals.names import COLOCATION
from amanda_driver_tf._tensorflow_internals.objects import (
    add_control_inputs,
    control_flow_context,
    operation_by_name,
)

__all__ = ["Cloned", "Part", "clone", "dirty_nodes"]

_ATTRIBUTE = "_amanda_clones"
_NUMBERS = itertools.count(1)
# Copies of one set of clones that are made without asking whether an owner could go.
_COPIES = 4


class Cloned:
    """Clones in a graph, and who uses them.

    Attributes:
        tensors: Tensor of the graph (op name and index) -> its clone.
        operations: Op of the graph (name) -> its clone, or what must run as well.
        tokens: Tokens of the host nodes, in order.
        owner: The use that its host functions belong to now, weakly.
    """

    def __init__(self) -> None:
        self.tensors: dict[tuple[str, int], Any] = {}
        self.operations: dict[str, Any] = {}
        self.kept: list[Any] = []
        self.tokens: list[str] = []
        self.owner: weakref.ref[Any] | None = None


def dirty_nodes(body: Body, changed: Sequence[Node], edited: bool = True) -> list[Node]:
    """The nodes that depend on one of `changed`, with these, in the order of the body.

    Args:
        body: The body.
        changed: The nodes.
        edited: Whether values differ from the graph's own. If not, an op whose kernel keeps a
            state stays, and reads these, where computing them a second time has no effect.
    """
    readers: dict[Any, list[Node]] = {}
    followers: dict[Any, list[Node]] = {}
    by_name = {node.name: node for node in body.nodes}
    for node in body.nodes:
        if not edited and keeps_state(node.op_type) and not _has_effects(node):
            continue
        for value in node.inputs:
            readers.setdefault(id(value.node), []).append(node)
        for control in node.controls:
            source = by_name.get(control) if isinstance(control, str) else control
            if source is not None:
                known = followers if keeps_state(node.op_type) else readers
                known.setdefault(id(source), []).append(node)
    frame_of = Frames(body).of
    frames: dict[Frame, list[Node]] = {}
    for node in body.nodes:
        if frame := frame_of(node):
            frames.setdefault(frame, []).append(node)
    dirty: set[int] = set()
    waiting = list(changed)
    spared: list[Node] = []
    while waiting:
        while waiting:
            node = waiting.pop()
            if id(node) in dirty:
                continue
            dirty.add(id(node))
            waiting += readers.get(id(node), [])
            spared += followers.get(id(node), [])
            # An old loop's parts run in one frame; a half of them in another would wait for ever.
            waiting += frames.get(frame_of(node), [])
        spared = [node for node in spared if id(node) not in dirty]
        staying = set(map(id, kept_as_they_are(body, spared, dirty)))
        waiting = [node for node in spared if id(node) not in staying]
    found = [node for node in body.nodes if id(node) in dirty]
    for node in found:
        refuse_second(node)
    return found


def _has_effects(node: Node) -> bool:
    """Return True if running what a node reads a second time might have an effect."""
    waiting, met = list(node.op.inputs), set()
    while waiting:
        op = waiting.pop().op
        if op.name not in met:
            met.add(op.name)
            if op.op_def.is_stateful:
                return True
            waiting += op.inputs
    return control_flow_context(node.op) is not None


@dataclass(frozen=True)
class Part:
    """What of a body that is rewritten goes into its graph once more.

    Attributes:
        body: The body.
        dirty: Its nodes that are to be cloned.
        new: The new nodes.
        kept: Those nodes that must run though nothing reads them.
        library: FunctionDefs that they call.
    """

    body: Body
    dirty: Sequence[Node]
    new: Sequence[New]
    kept: Sequence[New | Node]
    library: Sequence[Any]


def clone(part: Part, written: Written) -> Cloned:
    """Add clones of the dirty nodes and the new nodes to the graph of a body, or reuse such.

    Args:
        part: What is added.
        written: Is told what to keep alive; the clones are its own for as long as it lives.
    """
    graph = part.body.graph
    graph_def, sources = _definition(part, written)
    hosts = {host.token: host for host in written.alive if isinstance(host, HostFunction)}
    signature, tokens = fingerprint(
        graph_def, {name: f"{value.node.name} {value.slot}" for name, value in sources.items()}
    )
    pool: dict[bytes, list[Cloned]] | None = getattr(graph, _ATTRIBUTE, None)
    if pool is None:
        pool = {}
        setattr(graph, _ATTRIBUTE, pool)
    copies = pool.setdefault(signature, [])
    if len(copies) >= _COPIES and all(copy.owner is not None and copy.owner() for copy in copies):
        # The graph would keep another copy for good; tools that were left may only wait for this.
        gc.collect()
    for known in copies:
        if known.owner is None or known.owner() is None:
            known.owner = weakref.ref(written)
            # The nodes have the tokens of earlier functions; these take their place.
            for old, token in zip(known.tokens, tokens, strict=True):
                hosts[token].stand_as(old)
            return known
    cloned = _import(part, graph_def, sources)
    cloned.tokens = tokens
    cloned.owner = weakref.ref(written)
    pool[signature].append(cloned)
    return cloned


def _definition(part: Part, written: Written) -> tuple[Any, dict[str, Value]]:
    """Return the GraphDef of the clones, and the values of the graph that it reads by name."""
    body, dirty, new, library = part.body, part.dirty, part.new, part.library
    graph_def = graph_pb2.GraphDef()
    graph_def.versions.CopyFrom(body.graph.graph_def_versions)
    graph_def.library.function.extend(library)
    names = Names({node.name for node in body.nodes})
    additions = node_defs(new, names, written)
    known = {definition.signature.name for definition in library}
    for function in written.alive:
        # Routines that were traced, also those that functions in the library call.
        if not isinstance(function, HostFunction) and function.name.decode() not in known:
            known.add(function.name.decode())
            graph_def.library.function.add().CopyFrom(function.definition)
    mine = {id(node) for node in dirty}
    sources: dict[Value, str] = {}

    def text(value: Value) -> str:
        if not isinstance(value.node, Node) or id(value.node) in mine:
            return f"{value.node.name}:{value.slot}"
        return f"{sources.setdefault(value, f'amanda_source_{len(sources)}')}:0"

    by_name = {definition.name: definition for definition in additions}
    dirty_names = {node.name for node in dirty}
    for node in dirty:
        definition = node_def_pb2.NodeDef()
        definition.CopyFrom(node.op.node_def)
        del definition.input[:]
        definition.op = node.op_type
        _keep_colocation(definition, dirty_names)
        definition.input.extend(text(value) for value in node.inputs)
        for control in node.controls:
            target = name_of(control)
            if not isinstance(control, str) or target in dirty_names:
                definition.input.append(f"^{target}")
        for key, value in node.attrs.items():
            definition.attr[key].CopyFrom(value)
        graph_def.node.append(definition)
    for addition in new:
        definition = by_name[addition.name]
        definition.input.extend(text(value) for value in addition.inputs)
        if isinstance(addition, Inlined):
            definition.input.extend(f"{name}:0" for name in addition.constants)
        definition.input.extend(f"^{c.name}" for c in addition.controls if not isinstance(c, str))
    graph_def.node.extend(additions)
    for definition in graph_def.node:
        if definition.op in ENTERS:
            definition.attr["frame_name"].s = b"amanda/" + definition.attr["frame_name"].s
    return graph_def, {name: value for value, name in sources.items()}


def _keep_colocation(definition: Any, names: set[str]) -> None:
    """Drop wishes to stand beside nodes that are not cloned; the device is theirs already."""
    if COLOCATION in definition.attr:
        listed = definition.attr[COLOCATION].list.s
        kept = [s for s in listed if not s.startswith(b"loc:@") or s[5:].decode() in names]
        del listed[:]
        if kept:
            listed.extend(kept)
        else:
            del definition.attr[COLOCATION]


def _import(part: Part, graph_def: Any, sources: dict[str, Value]) -> Cloned:
    body, dirty = part.body, part.dirty
    graph = body.graph
    cloned = Cloned()
    prefix = f"amanda_{next(_NUMBERS)}"
    clean = {node.name for node in body.nodes} - {node.name for node in dirty}
    with hiding(graph) as hidden:
        for value in sources.values():
            hide_consumers(value.node.op.outputs[value.slot], hidden)
        input_map = {
            f"{name}:0": value.node.op.outputs[value.slot] for name, value in sources.items()
        }
        try:
            importer.import_graph_def(graph_def, input_map=input_map, name=prefix)
        except ValueError as error:
            raise UnsupportedError(
                f"TensorFlow does not build the graph with what was inserted in it: {error}",
                fix="Do not edit inputs that are shapes or sizes with staged routines, as their "
                "values are then unknown when the graph is built",
            ) from error
        for node in dirty:
            op = operation_by_name(graph, f"{prefix}/{node.name}")
            cloned.operations[node.name] = op
            for index, tensor in enumerate(op.outputs):
                cloned.tensors[node.name, index] = tensor
            add_control_inputs(
                op, [operation_by_name(graph, c) for c in node.controls if c in clean]
            )
        for addition in part.new:
            op = operation_by_name(graph, f"{prefix}/{addition.name}")
            for index, tensor in enumerate(op.outputs):
                cloned.tensors[addition.name, index] = tensor
            add_control_inputs(
                op,
                [
                    cloned.operations.get(c) or operation_by_name(graph, c)
                    for c in addition.controls
                    if isinstance(c, str)
                ],
            )
        cloned.kept = [operation_by_name(graph, f"{prefix}/{k.name}") for k in part.kept]
    return cloned
