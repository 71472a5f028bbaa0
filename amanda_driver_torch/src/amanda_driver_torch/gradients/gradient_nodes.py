"""Finds the node that computes the gradients of several inputs of an op.

Owns the search among the op's nodes, and the conversion of the node's results into gradients of the
inputs. Registers no hooks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from amanda_driver_torch.gradients.nodes import Edge, Slot, edges_from, name_of
from amanda_driver_torch.torch_internals.internals import (
    AccumulateGrad,
    input_metadata,
    saved_dims,
    saved_sizes,
)

#: Nodes of operators that keep the order of elements, and change the shape.
_RESHAPING = {
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
}
#: The most dimensions that are permuted: each is a digit.
_MANY = 10


#: Edge -> the nodes with this outgoing edge, and the numbers of their results.
_Leading: TypeAlias = "dict[Edge, list[tuple[Any, int]]]"


class Result(NamedTuple):
    """One result of a node.

    Attributes:
        number: Its number.
        way: ``reshape`` or ``t`` if that makes it the gradient of the input, else empty. If the op
            permuted dimensions, their order, such as ``021``: with the input's dimensions in this
            order, its gradient has the result's elements in order.
    """

    number: int
    way: str

    @property
    def order(self) -> list[int]:
        """The order of the input's dimensions; empty if they were not permuted."""
        return [int(d) for d in self.way] if self.way.isdigit() else []

    def given(self, value: torch.Tensor | None, shape: torch.Size | None) -> torch.Tensor | None:
        """Return the gradient of an input of `shape`, given this result of the node.

        The engine has given the result the shape and the dtype of the input that it goes to.
        """
        if value is None or not self.way or value.is_nested:
            return value
        if self.way == "t":
            return value.t()
        assert shape is not None
        if not (order := self.order):
            return value.reshape(shape)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return value.reshape([shape[d] for d in order]).permute(inverse)

    def back(self, gradient: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor | None:
        """Return this result of the node, changed so that the input gets `gradient`."""
        if gradient is None or not self.way:
            return gradient
        if self.way == "t":
            return gradient.t()
        if self.order:
            gradient = gradient.permute(self.order)
        return gradient.reshape(value.shape)


class GradientNode(NamedTuple):
    """A node that computes the gradients of several inputs.

    Attributes:
        node: The node.
        results: Slot of an input -> the result that is its gradient.
    """

    node: Any
    results: dict[Slot, Result]


def find_gradient_node(nodes: Sequence[Any], edges: Mapping[Slot, Edge]) -> GradientNode | None:
    """Return the node that computes the gradients of all `edges`; None if there is none.

    Args:
        nodes: The nodes that an op made.
        edges: Slot of an input -> the edge to which its gradient goes.
    """
    leading = _leading(nodes)
    found = {slot: _origins(leading, edge) for slot, edge in edges.items()}
    for node in nodes:
        if all(node in results for results in found.values()):
            return GradientNode(node, {slot: results[node] for slot, results in found.items()})
    return None


def _origins(leading: _Leading, edge: Edge) -> dict[Any, Result]:
    """Return the nodes whose results become the gradient of an edge, and how."""
    found: dict[Any, Result] = {}
    layout = _Layout()
    while True:
        origins = leading.get(edge, [])
        if len(origins) != 1:
            return found
        ((node, number),) = origins
        found[node] = Result(number, layout.way())
        if not layout.pass_on(node):
            return found
        edge = (node, 0)


class _Layout:
    """How operators that only change the layout have changed that of an input."""

    def __init__(self) -> None:
        #: The input's dimensions as they come now; None for further ones, of size one.
        self._order: list[int | None] = list(range(_MANY))
        #: Whether dimensions have been permuted, perhaps to their old order.
        self._permuted = False
        #: Whether there have been others in between, so that dimensions are not known any more.
        self._reshaped = False
        #: Whether it is transposed, and has one or two dimensions.
        self._transposed = False

    def way(self) -> str:
        """Return the `Result.way` of a result that is a gradient in this layout."""
        if self._transposed:
            return "t"
        order = [d for d in self._order if d is not None]
        if self._permuted:
            return "".join(map(str, order))
        return "reshape" if self._reshaped or len(order) < len(self._order) else ""

    def pass_on(self, node: Any) -> bool:
        """Change the layout as the operator of a node did; return False if the operator does more
        than that.
        """
        name = name_of(node)
        if name == "ExpandBackward0":
            # If the shape is unchanged, nothing is summed.
            (given,) = input_metadata(node) or (None,)
            return given is not None and tuple(given.shape) == saved_sizes(node)
        if name == "CloneBackward0":
            return True
        if self._transposed:
            return False
        if name in _RESHAPING:
            self._reshaped = True
        elif name == "UnsqueezeBackward0":
            (dim,) = saved_dims(node)
            self._order.insert(dim, None)
            # Counted from the end, which is not known.
            self._reshaped |= dim < 0
        elif name == "PermuteBackward0" and not self._reshaped:
            dims = saved_dims(node)
            if len(dims) > len(self._order):
                return False
            self._order = [self._order[dim % len(dims)] for dim in dims]
            self._permuted = True
        elif name == "TBackward0" and not self.way():
            self._transposed = True
        else:
            return False
        return True


def group_nodes(
    nodes: Sequence[Any],
    edges: Mapping[Slot, Edge],
    groups: Iterable[frozenset[int]],
    base: Any = None,
) -> Iterator[tuple[frozenset[int], list[Slot], GradientNode | None]]:
    """Find where to read the gradients of inputs that are requested together.

    Args:
        nodes: The nodes that an op made.
        edges: Slot of an input -> the edge to which its gradient goes.
        groups: Positions whose gradients are requested together.
        base: The node whose first result is the gradient of the base of input 0, if that is a view.

    Yields:
        For each group, its inputs that get gradients, if any, and the node, or None if there is no
        such node.
    """
    places = {slot: results for slot, results, _ in _results(nodes, edges)}
    if base is not None:
        places[0, None] = [(base, 0)]
    for group in groups:
        chosen = [slot for slot in places if slot[0] in group and places[slot]]
        if not chosen:
            continue
        node = places[chosen[0]][0][0]
        if all(len(places[slot]) == 1 and places[slot][0][0] is node for slot in chosen):
            results = {slot: Result(places[slot][0][1], "") for slot in chosen}
            yield group, chosen, GradientNode(node, results)
        else:
            yield group, chosen, find_gradient_node(nodes, {slot: edges[slot] for slot in chosen})


def contributors(
    nodes: Sequence[Any], edges: Mapping[Slot, Edge], chosen: Iterable[Slot]
) -> list[list[Any]] | None:
    """Return for each chosen input the nodes whose results the engine adds up, with the results'
    numbers.

    Args:
        nodes: The nodes that an op made.
        edges: Slot of every input -> the edge to which its gradient goes.
        chosen: Some of these inputs.

    Returns:
        None if a chosen tensor is also at another position that the nodes do not distinguish.
    """
    found = {slot: results if own else [] for slot, results, own in _results(nodes, edges)}
    of_chosen = [found[slot] for slot in chosen]
    return of_chosen if all(of_chosen) else None


def casts_of_leaves(nodes: Sequence[Any]) -> dict[Edge, Edge]:
    """Return the edges of leaves -> those of their casts, to which the nodes of an op lead.

    Autocast casts a leaf once for all operators, whose gradients are added up before the cast's
    own node.
    """
    casts = {
        (following, number)
        for node in nodes
        for following, number in node.next_functions
        if following is not None and name_of(following) == "ToCopyBackward0"
    }
    return {
        edges_from(cast)[0]: (cast, number)
        for cast, number in casts
        if isinstance(cast.next_functions[0][0], AccumulateGrad)
    }


def _results(
    nodes: Sequence[Any], edges: Mapping[Slot, Edge]
) -> Iterator[tuple[Slot, list[tuple[Any, int]], bool]]:
    """Yield for each input the results of nodes that go to its edge, and whether to it alone."""
    leading, times = _leading(nodes), Counter(edges.values())
    taken: Counter[Edge] = Counter()
    for slot, edge in edges.items():
        found = leading.get(edge, [])
        is_ordered = len(found) == times[edge] and len({node for node, _ in found}) <= 1
        if is_ordered:
            # The same tensor at several positions: results are in the order of the arguments.
            found = [found[taken[edge]]]
            taken[edge] += 1
        yield slot, found, is_ordered or times[edge] == 1


def _leading(nodes: Sequence[Any]) -> _Leading:
    found: _Leading = {}
    for node in nodes:
        for index, edge in enumerate(edges_from(node)):
            found.setdefault(edge, []).append((node, index))
    return found
