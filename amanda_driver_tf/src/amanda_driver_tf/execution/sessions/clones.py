"""Clones: hidden copies of the part of a session's graph that instrumentation changes.

Owns what has to be cloned (everything that depends on a changed node, and whole TensorFlow 1 while
loops), how clones are added to the graph, and their reuse. Ops cannot be removed from a graph, so
clones whose session is over are given to the next session that needs the same ones.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tensorflow.core.framework import graph_pb2, node_def_pb2

from amanda_core.interface import UnsupportedError
from amanda_driver_tf.execution.sessions.fingerprint import fingerprint
from amanda_driver_tf.execution.sessions.hiding import hide_consumers, hiding
from amanda_driver_tf.graphs.body import Body, Node, Value
from amanda_driver_tf.graphs.kernel_state import keeps_state, kept_as_they_are, refuse_second
from amanda_driver_tf.graphs.loop_frames import ENTERS, Frame, Frames
from amanda_driver_tf.insertion.function_def_writing import Names, Written, name_of, node_defs
from amanda_driver_tf.insertion.host_functions import HostFunction
from amanda_driver_tf.insertion.nodes import Inlined, New
from amanda_driver_tf.tensorflow_internals.modules import importer
from amanda_driver_tf.tensorflow_internals.names import COLOCATION
from amanda_driver_tf.tensorflow_internals.objects import (
    add_control_inputs,
    control_flow_context,
    operation_by_name,
)

__all__ = ["Cloned", "Part", "clone", "dirty_nodes"]

_ATTRIBUTE = "_amanda_clones"
_NUMBERS = itertools.count(1)
# From this number of copies on, collect garbage before another copy is made.
_COPIES = 4


class Cloned:
    """Clones in a graph, and their owner.

    Attributes:
        tensors: Tensor of the graph (op name and index) -> its clone.
        operations: Op of the graph (name) -> its clone.
        kept: Clones that must run though nothing reads them.
        tokens: Tokens of the host nodes, in order.
        owner: Weak reference to the `Written` whose host functions they call now.
    """

    def __init__(self) -> None:
        self.tensors: dict[tuple[str, int], Any] = {}
        self.operations: dict[str, Any] = {}
        self.kept: list[Any] = []
        self.tokens: list[str] = []
        self.owner: weakref.ref[Any] | None = None


def dirty_nodes(body: Body, changed: Sequence[Node], edited: bool = True) -> list[Node]:
    """Return `changed` and all nodes that depend on them, in the order of the body.

    Args:
        body: The body.
        changed: The nodes.
        edited: Whether any value differs from the graph's own. If not, ops whose kernels keep a
            state need not be cloned, unless computing their inputs twice has side effects.
    """
    dependents = _Dependents(body, edited)
    dirty: set[int] = set()
    waiting = list(changed)
    spared: list[Node] = []
    while waiting:
        while waiting:
            node = waiting.pop()
            if id(node) not in dirty:
                dirty.add(id(node))
                waiting += dependents.of(node)
                spared += dependents.followers.get(id(node), ())
        spared = [node for node in spared if id(node) not in dirty]
        staying = set(map(id, kept_as_they_are(body, spared, dirty)))
        waiting = [node for node in spared if id(node) not in staying]
    found = [node for node in body.nodes if id(node) in dirty]
    for node in found:
        refuse_second(node)
    return found


class _Dependents:
    """The nodes of a body that depend on a node.

    Args:
        body: The body.
        edited: As in `dirty_nodes`.

    Attributes:
        followers: Id of a node -> the nodes whose kernels keep a state and that only run after it.
    """

    def __init__(self, body: Body, edited: bool) -> None:
        self._readers: defaultdict[int, list[Node]] = defaultdict(list)
        self.followers: defaultdict[int, list[Node]] = defaultdict(list)
        by_name = {node.name: node for node in body.nodes}
        for node in body.nodes:
            keeps = keeps_state(node.op_type)
            if not edited and keeps and not _has_effects(node):
                continue
            for value in node.inputs:
                self._readers[id(value.node)].append(node)
            for control in node.controls:
                source = by_name.get(control) if isinstance(control, str) else control
                if source is not None:
                    (self.followers if keeps else self._readers)[id(source)].append(node)
        self._frame_of = Frames(body).of
        self._frames: defaultdict[Frame, list[Node]] = defaultdict(list)
        for node in body.nodes:
            if frame := self._frame_of(node):
                self._frames[frame].append(node)

    def of(self, node: Node) -> list[Node]:
        """Return the nodes that must be cloned if a node is."""
        # All nodes of a TensorFlow 1 loop share a frame. A partly cloned loop would hang.
        together = self._frames.get(self._frame_of(node), [])
        return [*self._readers.get(id(node), []), *together]


def _has_effects(node: Node) -> bool:
    """Return True if computing a node's inputs a second time might have side effects."""
    waiting, seen = list(node.op.inputs), set()
    while waiting:
        op = waiting.pop().op
        if op.name not in seen:
            seen.add(op.name)
            if op.op_def.is_stateful:
                return True
            waiting += op.inputs
    return control_flow_context(node.op) is not None


@dataclass(frozen=True)
class Part:
    """The part of a rewritten body that is added to its graph.

    Attributes:
        body: The body.
        dirty: Its nodes that must be cloned.
        new: The new nodes.
        kept: Nodes that must run though nothing reads them.
        library: FunctionDefs that they call.
    """

    body: Body
    dirty: Sequence[Node]
    new: Sequence[New]
    kept: Sequence[New | Node]
    library: Sequence[Any]


def clone(part: Part, written: Written) -> Cloned:
    """Add clones of the dirty nodes, and the new nodes, to the graph of a body, or reuse some.

    Args:
        part: What is added.
        written: Collects what must stay alive. It owns the clones for as long as it lives.
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
        # The graph would keep another copy for good; owners may be garbage already.
        gc.collect()
    for known in copies:
        if known.owner is None or known.owner() is None:
            known.owner = weakref.ref(written)
            # The nodes have the tokens of earlier functions, whose registry entries are replaced.
            for old, token in zip(known.tokens, tokens, strict=True):
                hosts[token].stand_as(old)
            return known
    cloned = _import(part, graph_def, sources)
    cloned.tokens = tokens
    cloned.owner = weakref.ref(written)
    pool[signature].append(cloned)
    return cloned


class _Inputs:
    """How clones name what they read.

    Args:
        dirty: The nodes that are cloned. Other nodes of the graph are read under names that stand
            for them while the clones are imported.

    Attributes:
        sources: Value of the graph that a clone reads -> the name that stands for its op.
    """

    def __init__(self, dirty: Sequence[Node]) -> None:
        self._dirty = {id(node) for node in dirty}
        self.sources: dict[Value, str] = {}

    def __call__(self, value: Value) -> str:
        """Return the text of an input."""
        if not isinstance(value.node, Node) or id(value.node) in self._dirty:
            return f"{value.node.name}:{value.slot}"
        return f"{self.sources.setdefault(value, f'amanda_source_{len(self.sources)}')}:0"


def _definition(part: Part, written: Written) -> tuple[Any, dict[str, Value]]:
    """Return the GraphDef of the clones, and the values of the graph that it reads, by name."""
    graph_def = graph_pb2.GraphDef()
    graph_def.versions.CopyFrom(part.body.graph.graph_def_versions)
    names = Names({node.name for node in part.body.nodes})
    additions = node_defs(part.new, names, written)
    graph_def.library.function.extend([*part.library, *_traced_functions(part, written)])
    inputs = _Inputs(part.dirty)
    dirty_names = {node.name for node in part.dirty}
    graph_def.node.extend(_cloned_node(node, inputs, dirty_names) for node in part.dirty)
    by_name = {definition.name: definition for definition in additions}
    for addition in part.new:
        definition = by_name[addition.name]
        definition.input.extend(map(inputs, addition.inputs))
        if isinstance(addition, Inlined):
            definition.input.extend(f"{name}:0" for name in addition.constants)
        definition.input.extend(f"^{c.name}" for c in addition.controls if not isinstance(c, str))
    graph_def.node.extend(additions)
    for definition in graph_def.node:
        if definition.op in ENTERS:
            definition.attr["frame_name"].s = b"amanda/" + definition.attr["frame_name"].s
    return graph_def, {name: value for value, name in inputs.sources.items()}


def _traced_functions(part: Part, written: Written) -> Iterator[Any]:
    """Yield the FunctionDefs of traced routines, including those that the library calls."""
    known = {definition.signature.name for definition in part.library}
    for function in written.alive:
        if not isinstance(function, HostFunction) and function.name.decode() not in known:
            known.add(function.name.decode())
            yield function.definition


def _cloned_node(node: Node, inputs: _Inputs, dirty_names: set[str]) -> Any:
    """Return the NodeDef of the clone of a node."""
    definition = node_def_pb2.NodeDef()
    definition.CopyFrom(node.op.node_def)
    del definition.input[:]
    definition.op = node.op_type
    _keep_colocation(definition, dirty_names)
    definition.input.extend(map(inputs, node.inputs))
    for control in node.controls:
        target = name_of(control)
        if not isinstance(control, str) or target in dirty_names:
            definition.input.append(f"^{target}")
    for key, value in node.attrs.items():
        definition.attr[key].CopyFrom(value)
    return definition


def _keep_colocation(definition: Any, names: set[str]) -> None:
    """Drop colocation with nodes that are not cloned. The device was copied already."""
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
                f"TensorFlow cannot build the graph with the inserted routines: {error}",
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
