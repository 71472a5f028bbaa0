"""Patterns of operators, and where a traced graph has them.

Owns what a pattern is made of and the search. Imports no framework.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from amanda_tools.graph.model import Edge, Graph, Node, Op

__all__ = ["Input", "Operator", "Place", "Site", "edges_at", "find"]

#: An input position, or a position with the place in the list that stands there.
Place = int | tuple[int, int]


@dataclass(frozen=True)
class Input:
    """Any value, also one that is no tensor. One name stands for one value.

    Attributes:
        name: Its name.
    """

    name: str


@dataclass(frozen=True)
class Operator:
    """An operator, with what its inputs have to be.

    Attributes:
        kinds: The common words and the backend's names that it may go by.
        inputs: Input position -> what stands there; other positions may have anything. Where a
            list of tensors stands, position and place in the list.
        name: Its name, each its own in a pattern.
        commutative: Whether positions 0 and 1 may be the other way round.
        optional: Whether it may be left out; the first of its inputs is there instead.
        where: What else has to hold of it.

    >>> pattern = Operator(("relu",), {0: Operator(("conv2d",), {0: Input("x")}, "conv")}, "relu")
    """

    kinds: tuple[str, ...]
    inputs: Mapping[Place, Operator | Input]
    name: str
    commutative: bool = False
    optional: bool = False
    where: Callable[[Op], bool] | None = None

    def operators(self) -> Iterator[Operator]:
        """This operator and those in front of it."""
        yield self
        for pattern in self.inputs.values():
            if isinstance(pattern, Operator):
                yield from pattern.operators()

    def allows(self, op: Op) -> bool:
        """Return True if an operator is one of these, its inputs aside."""
        known = op.word in self.kinds or op.type in self.kinds
        return known and (self.where is None or self.where(op))


@dataclass(frozen=True)
class Site:
    """One place in a graph that a pattern fits.

    Attributes:
        ops: Name in the pattern -> operator, the last one first.
        links: Index of an operator -> place of an input -> index of the operator of the pattern
            that its value comes from.
        inputs: Name of an input -> operator and place where it stands, all of them.
    """

    ops: Mapping[str, Op]
    links: Mapping[int, Mapping[Place, int]]
    inputs: Mapping[str, tuple[tuple[int, Place], ...]]

    @property
    def tail(self) -> Op:
        """The last operator."""
        return next(iter(self.ops.values()))

    def refusal(self, graph: Graph) -> str | None:
        """Why the operators cannot be rewritten, or None."""
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
        """The ways in which an operator and what is in front of it fit a pattern."""
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


def edges_at(graph: Graph, op: Node, place: Place) -> list[Edge]:
    """The values that stand at a place of an operator's inputs."""
    position, item = place if isinstance(place, tuple) else (place, None)
    return [
        edge
        for edge in graph.edges_into(op, position)
        if edge.kind == "value" and (item is None or edge.item == item)
    ]


def _sources(edges: list[Edge]) -> frozenset[tuple[int, int | None]]:
    return frozenset((edge.producer, edge.output) for edge in edges)


def find(graph: Graph, pattern: Operator) -> list[Site]:
    """The places in a graph that a pattern fits, one for each last operator, in order.

    An optional operator that is there is taken.
    """
    found = []
    for op in graph.ops:
        search = next(itertools.islice(_Search(graph).fit(pattern, op), 1), None)
        if search is not None:
            found.append(Site(search.ops, search.links, search.inputs))
    return found
