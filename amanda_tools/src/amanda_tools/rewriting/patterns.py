"""Patterns of operators, and where a traced graph has them.

Owns what a pattern is made of and the search. Imports no framework.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from amanda_tools.graph.model import Edge, Graph, Op

__all__ = ["Input", "Operator", "Site", "find"]


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
        inputs: Input position -> what stands there; other positions may have anything.
        name: Its name, each its own in a pattern.
        commutative: Whether positions 0 and 1 may be the other way round.
        optional: Whether it may be left out; what stands at its first position is there instead.
        where: What else has to hold of it.

    >>> pattern = Operator(("relu",), {0: Operator(("conv2d",), {0: Input("x")}, "conv")}, "relu")
    """

    kinds: tuple[str, ...]
    inputs: Mapping[int, Operator | Input]
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
        """Whether an operator is one of these, its inputs aside."""
        known = op.word in self.kinds or op.type in self.kinds
        return known and (self.where is None or self.where(op))


@dataclass(frozen=True)
class Site:
    """One place in a graph that a pattern fits.

    Attributes:
        ops: Name in the pattern -> operator, the last one first.
        links: Index of an operator -> input position -> index of the operator of the pattern that
            its value comes from.
        inputs: Name of an input -> operator and input position where it stands, all of them.
    """

    ops: Mapping[str, Op]
    links: Mapping[int, Mapping[int, int]]
    inputs: Mapping[str, tuple[tuple[int, int], ...]]

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
    links: dict[int, dict[int, int]] = field(default_factory=dict)
    inputs: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def copy(self) -> _Search:
        links = {index: dict(found) for index, found in self.links.items()}
        return _Search(self.graph, dict(self.ops), links, dict(self.inputs))

    def fit(self, pattern: Operator, op: Op) -> Iterator[_Search]:
        """The ways in which an operator and what is in front of it fit a pattern."""
        if pattern.allows(op) and op not in self.ops.values():
            orders = [dict(pattern.inputs)]
            if pattern.commutative:
                swapped = {{0: 1, 1: 0}.get(p, p): found for p, found in pattern.inputs.items()}
                orders.append(swapped)
            for order in orders:
                begun = self.copy()
                begun.ops[pattern.name] = op
                yield from begun._fit_inputs(op, list(order.items()))

    def _fit_inputs(self, op: Op, wanted: list[tuple[int, Operator | Input]]) -> Iterator[_Search]:
        if not wanted:
            yield self
            return
        (position, pattern), *others = wanted
        for found in self._fit_input(op, position, pattern):
            yield from found._fit_inputs(op, others)

    def _fit_input(self, op: Op, position: int, pattern: Operator | Input) -> Iterator[_Search]:
        edges = [edge for edge in self.graph.edges_into(op, position) if edge.kind == "value"]
        if isinstance(pattern, Input):
            before = self.inputs.get(pattern.name, ())
            if before and self._source(*before[0]) != _sources(edges):
                return
            found = self.copy()
            found.inputs[pattern.name] = (*before, (op.index, position))
            yield found
            return
        producers = {edge.producer for edge in edges}
        if len(producers) == 1 and all(edge.item is None for edge in edges):
            producer = self.graph.nodes[producers.pop()]
            if isinstance(producer, Op) and not producer.is_backward:
                for found in self.fit(pattern, producer):
                    found.links.setdefault(op.index, {})[position] = producer.index
                    yield found
        if pattern.optional:
            first = pattern.inputs[min(pattern.inputs)]
            yield from self._fit_input(op, position, first)

    def _source(self, index: int, position: int) -> frozenset[tuple[int, int | None]]:
        return _sources(self.graph.edges_into(self.graph.nodes[index], position))


def _sources(edges: list[Edge]) -> frozenset[tuple[int, int | None]]:
    return frozenset((edge.producer, edge.output) for edge in edges if edge.kind == "value")


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
