"""`Graph`: operators and the values between them, as data.

Defines the data model and its queries. `tracing` creates graphs of running programs; `files` reads
and writes them. Imports no framework.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from amanda_core.results import OpFigures
from amanda_tools.kit.operators.entries import OpFacts, with_parents
from amanda_tools.kit.output.extras import require
from amanda_tools.kit.tensors.types import Position, TensorType

__all__ = ["Edge", "Graph", "Module", "Node", "Op", "Source"]


@dataclass(eq=False)
class Op(OpFacts):
    """One operator, as it was in its first execution.

    Attributes:
        index: Index in `Graph.nodes`; does not change while the graph grows.
        zone: ``model``, or another part of the program: ``optimizer``, ``init``.
        program: Name of the function or graph that contains it; empty in eager modes.
        forward: For a backward operator, the index of its forward operator; None for any other.
        is_backward: Whether it belongs to the backward program.
        input_names: Names of the input positions, as far as known.
        inputs: Tensor types by input position. The inputs of a backward operator are the gradients
            of the outputs.
        outputs: Tensor types by output position.
        arguments: Inputs and attributes that are not tensors, as text, by name.
        writes: Input positions whose tensors the operator writes.
        executions: Number of executions, not counting the second run of a checkpoint; None in
            graphs, whose executions are not observed.
        notes: Figures of other tools, such as ``{"flops: macs": 4096}``. Tools may write them while
            they run, or `Graph.annotate` adds them later.
    """

    index: int
    zone: str = "model"
    program: str = ""
    forward: int | None = None
    is_backward: bool = False
    input_names: list[str] = field(default_factory=list)
    inputs: list[Position] = field(default_factory=list)
    outputs: list[Position] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)
    writes: list[int] = field(default_factory=list)
    executions: int | None = 0
    notes: dict[str, str | int | float | None] = field(default_factory=dict)

    # Compare by identity, so that an operator can be a key.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def kind(self) -> str:
        """Return the common type, or the framework's if there is none."""
        return self.word or self.type


@dataclass(eq=False)
class Source:
    """Origin of a value that no operator of the graph produced.

    Attributes:
        index: Index in `Graph.nodes`.
        kind: ``input``, ``parameter``, ``constant`` (this includes the buffers of modules), or
            ``call`` for an operator that passes values on and controls the graph: a loop, a branch
            or a call of a function.
        name: The framework's name, or the module and input that read it first.
        tensor: Type of the tensor; None if unknown.
        program: Name of the function or graph that contains it; empty in eager modes.
    """

    index: int
    kind: Literal["input", "parameter", "constant", "call"]
    name: str
    tensor: TensorType | None = None
    program: str = ""


Node = Op | Source


@dataclass
class Edge:
    """One value that passes from a node to an operator.

    Attributes:
        producer: Index of the node that produces the value.
        output: Output position of the producer; None if the producer did not return the value but
            wrote it into one of its inputs.
        consumer: Index of the operator that takes the value.
        input: Input position of the consumer.
        item: Index in the list at that position; None if there is no list.
        kind: ``value``, or ``alias`` if the value was changed by a write to another tensor that
            shares its memory.
        first: Number of the consumer's execution that first took the value, from 0. A higher number
            means a later iteration of a loop, another branch, or a later step.
        executions: Number of executions that took the value; None if executions are not observed.
        calls: Pairs for the first executions: number of the producer's execution and number of the
            consumer's that took its value, each from 0.
        back: Whether the edge closes a cycle: a later execution of an earlier operator reads the
            value. `Graph.connect` sets it. Without these edges the graph has no cycle.
    """

    producer: int
    output: int | None
    consumer: int
    input: int
    item: int | None = None
    kind: Literal["value", "alias"] = "value"
    first: int = 0
    executions: int | None = 0
    calls: list[tuple[int, int]] = field(default_factory=list)
    back: bool = False


@dataclass
class Module:
    """A module, or the program as a whole.

    Attributes:
        name: Last part of its path; empty for the whole program.
        path: Path from the outermost module.
        ops: Operators that run in it, but not in one of its children.
        children: Modules inside it, by name, in the order of first execution.
    """

    name: str
    path: str
    ops: list[Op] = field(default_factory=list)
    children: dict[str, Module] = field(default_factory=dict)

    def walk(self) -> Iterator[Module]:
        """Yield this module and all modules inside it, outermost first."""
        yield self
        for child in self.children.values():
            yield from child.walk()


class Graph:
    """The operators of one namespace, and the values between them.

    The graph grows while it is traced, and queries answer for the graph so far. Operators are in
    the order of first execution (in graphs: of creation). Apart from loops, each comes after the
    operators whose values it takes.

    Args:
        namespace: ``framework/version/mode``.

    Attributes:
        nodes: Operators and sources; the `index` of each is its position here.
        edges: The values between them.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self._into: dict[int, list[Edge]] = {}
        self._from: dict[int, list[Edge]] = {}
        #: Node -> the operators that take its values, along edges that close no cycle.
        self._next: dict[int, set[int]] = {}
        #: Operator -> the nodes whose values it takes along these edges.
        self._before: dict[int, set[int]] = {}
        self._known: dict[tuple[Any, ...], Edge] = {}
        self._backward: dict[int, list[Op]] = {}
        self._ids: dict[tuple[int, bool], Op] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        counts = f"{len(self.ops)} ops, {len(self.backward_ops)} backward"
        return f"<Graph {self.namespace}: {counts}, {len(self.edges)} edges>"

    # Nodes.

    @property
    def ops(self) -> list[Op]:
        """Return the operators of the forward program."""
        return [node for node in self.nodes if isinstance(node, Op) and not node.is_backward]

    @property
    def backward_ops(self) -> list[Op]:
        """Return the operators of the backward program."""
        return [node for node in self.nodes if isinstance(node, Op) and node.is_backward]

    @property
    def sources(self) -> list[Source]:
        """Return the inputs, parameters, constants and calls."""
        return [node for node in self.nodes if isinstance(node, Source)]

    def op(self, number: int, backward: bool = False) -> Op | None:
        """Return the operator with an op id; with `backward`, the one with a backward op id."""
        return self._ids.get((number, backward))

    def forward_of(self, op: Op) -> Op | None:
        """Return the forward operator of a backward operator, or None."""
        found = None if op.forward is None else self.nodes[op.forward]
        return found if isinstance(found, Op) else None

    def backward_of(self, op: Op) -> list[Op]:
        """Return the backward operators of a forward operator that have run so far."""
        return list(self._backward.get(op.index, ()))

    # Edges.

    def edges_into(self, node: Node, position: int | None = None) -> list[Edge]:
        """Return the edges into a node, or only those into one input position."""
        edges = self._into.get(node.index, ())
        return [edge for edge in edges if position is None or edge.input == position]

    def edges_from(self, node: Node, position: int | None = None) -> list[Edge]:
        """Return the edges from a node, or only those from one output position."""
        edges = self._from.get(node.index, ())
        return [edge for edge in edges if position is None or edge.output == position]

    def predecessors(self, op: Node, position: int | None = None) -> list[Op]:
        """Return the operators whose values `op` takes, without duplicates, by input position."""
        return self._ops(edge.producer for edge in self.edges_into(op, position))

    def successors(self, op: Node, position: int | None = None) -> list[Op]:
        """Return the operators that have taken values of `op` so far, without duplicates."""
        return self._ops(edge.consumer for edge in self.edges_from(op, position))

    def sources_of(self, op: Op) -> list[Source]:
        """Return the inputs, parameters and constants that `op` takes, by input position."""
        nodes = (self.nodes[edge.producer] for edge in self.edges_into(op))
        return _each_once(node for node in nodes if isinstance(node, Source))

    def chain(self, op: Op, *kinds: str) -> list[Op] | None:
        """Find a chain of operators that ends at `op`.

        Args:
            op: The last operator.
            *kinds: Common or framework types in the order of execution; the last is that of `op`.

        Returns:
            One operator for each type, or None if no chain of predecessors matches.

        ``graph.chain(op, "conv2d", "batch_norm", "relu")``
        """
        if not kinds or kinds[-1] not in (op.word, op.type):
            return None
        if len(kinds) == 1:
            return [op]
        for before in self.predecessors(op):
            found = self.chain(before, *kinds[:-1])
            if found is not None:
                return [*found, op]
        return None

    def module_tree(self) -> Module:
        """Return the modules with their operators; a backward operator is where its forward
        operator is.
        """
        root = Module("", "")
        for op in self.nodes:
            if not isinstance(op, Op):
                continue
            module = root
            for path in with_parents((self.forward_of(op) or op).module)[1:]:
                name = path[len(module.path) :].lstrip("./")
                module = module.children.setdefault(name, Module(name, path))
            module.ops.append(op)
        return root

    def to_networkx(self, *, backward: bool = True, sources: bool = True) -> Any:
        """Return a `networkx.MultiDiGraph` whose nodes are indices, with the attributes of nodes
        and edges.

        Args:
            backward: Include backward operators.
            sources: Include inputs, parameters and constants.

        Raises:
            MissingExtraError: networkx is not installed.
        """
        networkx = require("networkx", "networkx")
        result = networkx.MultiDiGraph(namespace=self.namespace)
        for node in tuple(self.nodes):
            if isinstance(node, Source) and not sources:
                continue
            if isinstance(node, Op) and node.is_backward and not backward:
                continue
            facts = {name: value for name, value in vars(node).items() if name != "index"}
            result.add_node(node.index, node="op" if isinstance(node, Op) else "source", **facts)
        for edge in tuple(self.edges):
            if edge.producer in result and edge.consumer in result:
                result.add_edge(edge.producer, edge.consumer, **vars(edge))
        return result

    def unrolled(self) -> Any:
        """Return a `networkx.MultiDiGraph` with a node for each of the first executions.

        An operator in a loop, or in a module that is called several times, is one node of this
        graph with several executions. In the unrolled graph it is several nodes, so there is no
        cycle. It covers the forward operators of eager modes and as many executions as were
        recorded (`Edge.calls`). A node is a pair: index of the operator and number of the
        execution. It has the attributes of the operator, and an edge those of the `Edge`.

        Raises:
            MissingExtraError: networkx is not installed.
        """
        result = require("networkx", "networkx").MultiDiGraph(namespace=self.namespace)
        for op in self.ops:
            calls = {call for edge in self.edges_into(op) for _, call in edge.calls}
            for call in sorted(calls | {call for e in self.edges_from(op) for call, _ in e.calls}):
                result.add_node((op.index, call), **vars(op))
        for edge in tuple(self.edges):
            for before, after in edge.calls:
                ends = (edge.producer, before), (edge.consumer, after)
                if ends[0] in result and ends[1] in result:
                    result.add_edge(*ends, **vars(edge))
        return result

    def annotate(self, figures: Iterable[OpFigures], tool: str = "") -> None:
        """Add the figures of another tool's result to the operators.

        Args:
            figures: The figures. Those of operators that are not in this graph are ignored.
            tool: Name of the tool, which is put before the names of its figures.

        ``graph.annotate(flops.result().op_figures(), "flops")``
        """
        for found in figures:
            op = self.op(found.id, found.is_backward)
            if op is not None and (op.namespace, op.name) == (found.namespace, found.name):
                before = f"{tool}: " if tool else ""
                op.notes.update((before + name, value) for name, value in found.values.items())

    def copy(self) -> Graph:
        """Return a copy of the graph as it is now."""
        result = Graph(self.namespace)
        with self._lock:
            nodes, edges = deepcopy(self.nodes), deepcopy(self.edges)
        for node in nodes:
            result.add(node)
        for edge in edges:
            result.connect(edge)
        return result

    # Growing.

    def add(self, node: Node) -> None:
        """Add a node and set its index."""
        with self._lock:
            node.index = len(self.nodes)
            self.nodes.append(node)
            if isinstance(node, Op):
                self._ids.setdefault((node.id, node.is_backward), node)
                if node.forward is not None:
                    self._backward.setdefault(node.forward, []).append(node)

    def connect(self, edge: Edge) -> Edge:
        """Add an edge, or return the existing edge between the same positions.

        Also detects whether the edge closes a cycle.
        """
        key = (edge.producer, edge.output, edge.consumer, edge.input, edge.item, edge.kind)
        with self._lock:
            known = self._known.setdefault(key, edge)
            if known is edge:
                edge.back = self._reaches(edge.consumer, edge.producer)
                self.edges.append(edge)
                # Sorting would take as long for each operand as for all.
                insort(self._into.setdefault(edge.consumer, []), edge, key=_by_position)
                self._from.setdefault(edge.producer, []).append(edge)
                if not edge.back:
                    self._next.setdefault(edge.producer, set()).add(edge.consumer)
                    self._before.setdefault(edge.consumer, set()).add(edge.producer)
            return known

    def _reaches(self, start: int, end: int) -> bool:
        """Return True if values pass from one node to another along edges that close no cycle."""
        # From both ends, as a new operator leads nowhere yet, and few operators lead to what an
        # optimizer writes.
        none: set[int] = set()
        known, seen = (self._next, self._before), ({start}, {end})
        left = [{start}, {end}]
        while all(left):
            way = len(seen[0]) > len(seen[1])
            left[way] = none.union(*(known[way].get(at, none) for at in left[way])) - seen[way]
            if not left[way].isdisjoint(seen[not way]):
                return True
            seen[way].update(left[way])
        return start == end

    def _ops(self, indices: Iterable[int]) -> list[Op]:
        nodes = (self.nodes[index] for index in indices)
        return _each_once(node for node in nodes if isinstance(node, Op))


def _by_position(edge: Edge) -> tuple[int, int, int]:
    return edge.input, edge.item or 0, edge.first


def _each_once(nodes: Iterable[Any]) -> list[Any]:
    return list({node.index: node for node in nodes}.values())
