"""`Graph`: operators and the values between them, as data.

Owns the data model and the questions that can be asked of it. `tracing` makes graphs of
running programs, `files` writes and reads them. Imports no framework.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from amanda_core.results import OpFigures
from amanda_tools.operators.entries import OpFacts, with_parents
from amanda_tools.output.extras import require
from amanda_tools.tensors.types import Position, TensorType

__all__ = ["Edge", "Graph", "Module", "Node", "Op", "Source"]


@dataclass(eq=False)
class Op(OpFacts):
    """One operator, as it was when it was met for the first time.

    Attributes:
        index: Number in `Graph.nodes`; stays the same while the graph grows.
        zone: ``model``, or which other part of a program: ``optimizer``, ``init``.
        program: Name of the function or graph that it belongs to; empty in eager modes.
        forward: Index of the forward operator of a backward operator; None for any other.
        is_backward: Whether it belongs to the backward program.
        input_names: Names of the input positions, as far as known.
        inputs: The tensor types by input position; of a backward operator those that arrive.
        outputs: The tensor types by output position.
        arguments: What is no tensor, as text, by the name of the input or attribute.
        writes: Input positions whose tensors it writes.
        executions: How often it ran, without those of a checkpoint's second run; None where
            executions are not seen, which is in graphs.
        notes: What other tools know of it, such as ``{"flops: macs": 4096}``. They may write here
            while they run, or `Graph.annotate` does later.
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

    # An operator is only equal to itself, and can be a key.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def kind(self) -> str:
        """The common word if there is one, else the backend's type."""
        return self.word or self.type


@dataclass(eq=False)
class Source:
    """Where a value comes from that no operator of the graph made.

    Attributes:
        index: Number in `Graph.nodes`.
        kind: ``input``; ``parameter``; ``constant``, which a module's buffer is as well; or
            ``call``, which is what steers a graph (loops, branches, calls of functions) and passes
            values on.
        name: The framework's name, or the module and input that it is first read by.
        tensor: Its type, None where it is not known.
        program: Name of the function or graph that it belongs to; empty in eager modes.
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
        producer: Index of the node that it comes from.
        output: Output position there; None where the operator did not return the value, but wrote
            one of its inputs.
        consumer: Index of the operator that takes it.
        input: Input position there.
        item: Place in the list that stands at this position; None where there is no list.
        kind: ``value``, or ``alias`` for what arrives because a tensor that shares memory with the
            value was written.
        first: Number of the consumer's execution in which it was first seen, from 0. Not 0: a
            later round of a loop, another branch, or a later step.
        executions: How often it was seen; None where executions are not seen.
        calls: Of the first executions, which took the value of which: the number of the producer's
            execution and that of the consumer's, each from 0.
        back: Whether it closes a circle: the value of one execution is read in a later one of an
            operator that leads to it. `Graph.connect` says so; without these edges no circle is
            left.
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
        name: Last part of its path; empty for the whole.
        path: Path from the outermost module.
        ops: Operators that run in it and in no module inside of it.
        children: Modules inside of it, by name, in order of first execution.
    """

    name: str
    path: str
    ops: list[Op] = field(default_factory=list)
    children: dict[str, Module] = field(default_factory=dict)

    def walk(self) -> Iterator[Module]:
        """This module and all inside of it, from the outside."""
        yield self
        for child in self.children.values():
            yield from child.walk()


class Graph:
    """The operators of one namespace, and the values between them.

    Grows while it is traced: what is asked is answered for the graph so far. Operators are in order
    of first execution (in graphs: of the graph), each after what it takes, loops aside.

    Args:
        namespace: ``framework/version/mode``.

    Attributes:
        nodes: Operators and sources; their `index` is the place here.
        edges: The values between them.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self._into: dict[int, list[Edge]] = {}
        self._from: dict[int, list[Edge]] = {}
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
        """The operators of the forward program."""
        return [node for node in self.nodes if isinstance(node, Op) and not node.is_backward]

    @property
    def backward_ops(self) -> list[Op]:
        """The operators of the backward program."""
        return [node for node in self.nodes if isinstance(node, Op) and node.is_backward]

    @property
    def sources(self) -> list[Source]:
        """Inputs, parameters, constants, and what passes values on."""
        return [node for node in self.nodes if isinstance(node, Source)]

    def op(self, number: int, backward: bool = False) -> Op | None:
        """The operator of an op id, or with `backward` that of a backward op id."""
        return self._ids.get((number, backward))

    def forward_of(self, op: Op) -> Op | None:
        """The forward operator of a backward operator, None if it has none."""
        found = None if op.forward is None else self.nodes[op.forward]
        return found if isinstance(found, Op) else None

    def backward_of(self, op: Op) -> list[Op]:
        """The backward operators of a forward operator, as far as they have run."""
        return list(self._backward.get(op.index, ()))

    # Edges.

    def edges_into(self, node: Node, position: int | None = None) -> list[Edge]:
        """Return what a node takes, or takes at one input position."""
        edges = self._into.get(node.index, ())
        return [edge for edge in edges if position is None or edge.input == position]

    def edges_from(self, node: Node, position: int | None = None) -> list[Edge]:
        """Who takes what a node gives, or gives at one output position."""
        edges = self._from.get(node.index, ())
        return [edge for edge in edges if position is None or edge.output == position]

    def predecessors(self, op: Node, position: int | None = None) -> list[Op]:
        """The operators whose values `op` takes, each once, by its input positions."""
        return self._ops(edge.producer for edge in self.edges_into(op, position))

    def successors(self, op: Node, position: int | None = None) -> list[Op]:
        """The operators that take what `op` gives, each once, as far as they have run."""
        return self._ops(edge.consumer for edge in self.edges_from(op, position))

    def sources_of(self, op: Op) -> list[Source]:
        """The inputs, parameters and constants that `op` takes, by its input positions."""
        nodes = (self.nodes[edge.producer] for edge in self.edges_into(op))
        return _each_once(node for node in nodes if isinstance(node, Source))

    def chain(self, op: Op, *kinds: str) -> list[Op] | None:
        """Look back from an operator: the operators of a chain that ends at it.

        Args:
            op: The last operator.
            *kinds: Common words, or types of the backend, in order of execution; the last one is
                that of `op`.

        Returns:
            One operator for each, or None where no chain of predecessors is like that.

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
        """The modules and the operators in them; backward operators are where their forward is."""
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
        """A `networkx.MultiDiGraph`: nodes are indices, with the attributes of nodes and edges.

        Args:
            backward: Whether to take the backward operators, too.
            sources: Whether to take inputs, parameters and constants, too.

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
                result.add_edge(edge.producer, edge.consumer, **asdict(edge))
        return result

    def unrolled(self) -> Any:
        """A `networkx.MultiDiGraph` in which each of the first executions is a node of its own.

        An operator of a loop, or of a module that is called several times, is one node of this
        graph with several executions; here it is several nodes, and there are no circles. Of the
        forward operators of eager modes, as many executions as were kept (`Edge.calls`). Nodes are
        pairs: index of the operator and number of the execution. They have the attributes of the
        operator, edges those of the edge.

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
                    result.add_edge(*ends, **asdict(edge))
        return result

    def annotate(self, figures: Iterable[OpFigures], tool: str = "") -> None:
        """Note at each operator what another tool's result says of it.

        Args:
            figures: What it says; of operators that are not in this graph it is left out.
            tool: Name of the tool, to put before the names of its figures.

        ``graph.annotate(flops.result().op_figures(), "flops")``
        """
        for found in figures:
            op = self.op(found.id, found.is_backward)
            if op is not None and (op.namespace, op.name) == (found.namespace, found.name):
                before = f"{tool}: " if tool else ""
                op.notes.update((before + name, value) for name, value in found.values.items())

    def copy(self) -> Graph:
        """The graph as it is now."""
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
        """Add a node; it gets its index here."""
        with self._lock:
            node.index = len(self.nodes)
            self.nodes.append(node)
            if isinstance(node, Op):
                self._ids.setdefault((node.id, node.is_backward), node)
                if node.forward is not None:
                    self._backward.setdefault(node.forward, []).append(node)

    def connect(self, edge: Edge) -> Edge:
        """Add an edge, or give the one that is there between the same positions.

        Whether it closes a circle is found out here.
        """
        key = (edge.producer, edge.output, edge.consumer, edge.input, edge.item, edge.kind)
        with self._lock:
            known = self._known.setdefault(key, edge)
            if known is edge:
                edge.back = self._reaches(edge.consumer, edge.producer)
                self.edges.append(edge)
                self._into.setdefault(edge.consumer, []).append(edge)
                self._into[edge.consumer].sort(key=_by_position)
                self._from.setdefault(edge.producer, []).append(edge)
            return known

    def _reaches(self, start: int, end: int) -> bool:
        """Return True if values pass from one node to another, circles aside."""
        # An operator that is met for the first time leads nowhere yet.
        seen, left = {start}, [start]
        while left:
            at = left.pop()
            if at == end:
                return True
            after = {edge.consumer for edge in self._from.get(at, ()) if not edge.back}
            left += after - seen
            seen |= after
        return False

    def _ops(self, indices: Iterable[int]) -> list[Op]:
        nodes = (self.nodes[index] for index in indices)
        return _each_once(node for node in nodes if isinstance(node, Op))


def _by_position(edge: Edge) -> tuple[int, int, int]:
    return edge.input, edge.item or 0, edge.first


def _each_once(nodes: Iterable[Any]) -> list[Any]:
    return list({node.index: node for node in nodes}.values())
