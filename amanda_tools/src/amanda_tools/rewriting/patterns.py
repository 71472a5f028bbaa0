"""Patterns of operators, and the search for them in a traced graph.

Imports no framework.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from amanda_tools.graph.model import Edge, Graph, Node, Op

__all__ = ["Input", "Operator", "Place", "Site", "edges_at", "find"]

#: An input position, or an input position and an index in the list there.
Place = int | tuple[int, int]


#: Common types of the operators that may return a view of their input.
_VIEWS = frozenset(
    ["reshape", "transpose", "split", "slice", "expand", "diag", "squeeze", "unsqueeze", "identity"]
)


@dataclass(frozen=True)
class Input:
    """Any value, including one that is not a tensor. The same name stands for the same value.

    Attributes:
        name: The name.
    """

    name: str


@dataclass(frozen=True)
class Operator:
    """An operator and its inputs in a pattern.

    Attributes:
        kinds: The common or framework types that match.
        inputs: Input position -> pattern; other positions match anything. For a list of tensors the
            key is the position and the index in the list.
        name: Name of the operator, unique in the pattern.
        commutative: Whether positions 0 and 1 may be swapped.
        optional: Whether the operator may be missing; its first input then takes its place.
        where: A further condition.

    >>> pattern = Operator(("relu",), {0: Operator(("conv2d",), {0: Input("x")}, "conv")}, "relu")
    """

    kinds: tuple[str, ...]
    inputs: Mapping[Place, Operator | Input]
    name: str
    commutative: bool = False
    optional: bool = False
    where: Callable[[Op], bool] | None = None

    def operators(self) -> Iterator[Operator]:
        """Yield this operator and those before it."""
        yield self
        for pattern in self.inputs.values():
            if isinstance(pattern, Operator):
                yield from pattern.operators()

    def allows(self, op: Op) -> bool:
        """Return True if an operator matches, apart from its inputs."""
        known = op.word in self.kinds or op.type in self.kinds
        return known and (self.where is None or self.where(op))


@dataclass(frozen=True)
class Site:
    """One place in a graph that matches a pattern.

    Attributes:
        ops: Name in the pattern -> operator, the last one first.
        links: Index of an operator -> place of an input -> index of the operator of the pattern
            that produces the value.
        inputs: Name of an input -> every operator and place where it occurs.
    """

    ops: Mapping[str, Op]
    links: Mapping[int, Mapping[Place, int]]
    inputs: Mapping[str, tuple[tuple[int, Place], ...]]

    @property
    def tail(self) -> Op:
        """Return the last operator."""
        return next(iter(self.ops.values()))

    def refusal(self, graph: Graph) -> str | None:
        """Return why the operators cannot be rewritten, or None."""
        indices = {op.index for op in self.ops.values()}
        for op in self.ops.values():
            if op.writes:
                return f"{op.name} works in place"
            if op is self.tail:
                continue
            for edge in graph.edges_from(op):
                consumer = graph.nodes[edge.consumer]
                is_backward = isinstance(consumer, Op) and consumer.is_backward
                if not is_backward and edge.consumer not in indices:
                    return f"the value of {op.name} is used by {consumer.name}, too"
        return None

    def written(self, graph: Graph) -> str | None:
        """Return which operator writes the value of the last one in place, or a view of it."""
        pending, seen = [self.tail], {self.tail}
        while pending:
            for edge in graph.edges_from(pending.pop()):
                consumer = graph.nodes[edge.consumer]
                if not isinstance(consumer, Op) or consumer.is_backward or consumer in seen:
                    continue
                if edge.input in consumer.writes:
                    return f"the value of {self.tail.name} is written by {consumer.name}"
                if consumer.word in _VIEWS:
                    seen.add(consumer)
                    pending.append(consumer)
        return None


@dataclass
class _Search:
    graph: Graph
    ops: dict[str, Op] = field(default_factory=dict)
    links: dict[int, dict[Place, int]] = field(default_factory=dict)
    inputs: dict[str, tuple[tuple[int, Place], ...]] = field(default_factory=dict)

    def copy(self) -> _Search:
        links = {index: dict(found) for index, found in self.links.items()}
        return _Search(self.graph, dict(self.ops), links, dict(self.inputs))

    def fit(self, pattern: Operator, op: Op) -> Iterator[_Search]:
        """Yield the ways in which an operator and those before it match a pattern."""
        if pattern.allows(op) and op not in self.ops.values():
            orders = [dict(pattern.inputs)]
            if pattern.commutative:
                other: dict[Place, Place] = {0: 1, 1: 0}
                swapped = {other.get(p, p): found for p, found in pattern.inputs.items()}
                orders.append(swapped)
            for order in orders:
                begun = self.copy()
                begun.ops[pattern.name] = op
                yield from begun._fit_inputs(op, list(order.items()))

    def _fit_inputs(
        self, op: Op, wanted: list[tuple[Place, Operator | Input]]
    ) -> Iterator[_Search]:
        if not wanted:
            yield self
            return
        (place, pattern), *others = wanted
        for found in self._fit_input(op, place, pattern):
            yield from found._fit_inputs(op, others)

    def _fit_input(self, op: Op, place: Place, pattern: Operator | Input) -> Iterator[_Search]:
        edges = edges_at(self.graph, op, place)
        if isinstance(pattern, Input):
            before = self.inputs.get(pattern.name, ())
            if before and self._source(*before[0]) != _sources(edges):
                return
            found = self.copy()
            found.inputs[pattern.name] = (*before, (op.index, place))
            yield found
            return
        producers = {edge.producer for edge in edges}
        alone = isinstance(place, tuple) or all(edge.item is None for edge in edges)
        if len(producers) == 1 and alone:
            producer = self.graph.nodes[producers.pop()]
            if isinstance(producer, Op) and not producer.is_backward:
                for found in self.fit(pattern, producer):
                    found.links.setdefault(op.index, {})[place] = producer.index
                    yield found
        if pattern.optional:
            first = next(iter(pattern.inputs.values()))
            yield from self._fit_input(op, place, first)

    def _source(self, index: int, place: Place) -> frozenset[tuple[int, int | None]]:
        return _sources(edges_at(self.graph, self.graph.nodes[index], place))


def _near(graph: Graph, pattern: Operator, since: tuple[int, int]) -> list[Op]:
    """Return the operators that may be the last one of a match with a new node or edge in it."""
    nodes, edges = since
    last = {node.index for node in graph.nodes[nodes:]}
    last.update(edge.consumer for edge in graph.edges[edges:])
    near = set(last)
    for _ in pattern.operators():
        last = {edge.consumer for i in last for edge in graph.edges_from(graph.nodes[i])} - near
        near |= last
    found = (graph.nodes[index] for index in sorted(near))
    return [op for op in found if isinstance(op, Op) and not op.is_backward]


def edges_at(graph: Graph, op: Node, place: Place) -> list[Edge]:
    """Return the edges of the values at a place of an operator's inputs."""
    position, item = place if isinstance(place, tuple) else (place, None)
    return [
        edge
        for edge in graph.edges_into(op, position)
        if edge.kind == "value" and (item is None or edge.item == item)
    ]


def _sources(edges: list[Edge]) -> frozenset[tuple[int, int | None]]:
    return frozenset((edge.producer, edge.output) for edge in edges)


def find(graph: Graph, pattern: Operator, since: tuple[int, int] = (0, 0)) -> list[Site]:
    """Return the places in a graph that match a pattern, in order, one for each last operator.

    An optional operator that is present becomes part of the match.

    Args:
        graph: The graph.
        pattern: The pattern.
        since: How many nodes and edges it had when the pattern was last searched. Then only the
            places are returned that may be new.
    """
    found = []
    for op in _near(graph, pattern, since):
        search = next(itertools.islice(_Search(graph).fit(pattern, op), 1), None)
        if search is not None:
            found.append(Site(search.ops, search.links, search.inputs))
    return found
