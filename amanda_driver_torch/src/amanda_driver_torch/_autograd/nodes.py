"""Autograd nodes as operators: which nodes an op made, and the raw operator that users see.

Owns the walk from an op's outputs to its own nodes and `BackwardOp`. Registers nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from amanda_driver_torch._autograd.own_nodes import OWN_NODES
from amanda_driver_torch._operators.signature import BoundCall
from amanda_driver_torch._thread.modes import unheard
from amanda_driver_torch._torch.internals import AccumulateGrad, current_node, sequence_number
from amanda_driver_torch._torch.reading import (
    base_of,
    is_differentiable,
    node_of,
    output_number,
    requires_grad,
)

__all__ = [
    "BackwardOp",
    "Edge",
    "Slot",
    "differentiable",
    "edge_of",
    "edges_from",
    "made",
    "name_of",
    "new_nodes",
    "new_nodes_behind",
    "placed",
    "route",
    "tensors_in",
]

#: Node and number of one of its gradient arguments; for a leaf, which may have no node yet, a mark
#: and its id.
Edge = tuple[Any, int]

#: Where a tensor stands: (position, None), or (position, i) for the i-th of a list.
Slot = tuple[int, int | None]

# Nodes of ops count up from 0; AccumulateGrad has 2**64 - 1 and the driver's own lie in between.
_LIMIT = 2**61

_LEAF = "leaf"

# Nodes that lie further behind an output than this are not looked for.
_FAR = 6


class BackwardOp:
    """The raw operator of a backward context: a node of the autograd graph by its name.

    The node itself is at hand only while it runs. A reference from here would keep the graph alive
    for ever, because the garbage collector cannot see through it.
    """

    __slots__ = ("__name__",)

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __repr__(self) -> str:
        return f"<{self.__name__}>"

    def name(self) -> str:
        """The node's name, such as ``ConvolutionBackward0``."""
        return self.__name__

    @property
    def node(self) -> Any:
        """The autograd node during the call of a routine, else None."""
        node = current_node()
        return node if node is not None and name_of(node) == self.__name__ else None

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """The node's edges towards the leaves, during the call of a routine."""
        node = self.node
        return () if node is None else node.next_functions


def name_of(node: Any) -> str:
    """The node's name as users see it; some carry their C++ namespace (`CopySlices`)."""
    # By the type: a user's autograd function may keep something by this name in its context.
    return str(type(node).name(node)).rpartition("::")[2]


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among values and in lists of them, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(tensors_in(value))
    return found


def _leaves_behind(node: Any) -> Iterator[Any]:
    for following, _ in node.next_functions:
        if isinstance(following, OWN_NODES):
            yield from _leaves_behind(following)
        elif isinstance(following, AccumulateGrad):
            yield following


def new_nodes(tensors: Sequence[torch.Tensor], start: int) -> tuple[list[Any], list[Any]]:
    """The nodes made since `start` that lead to `tensors`, and the leaves they end in.

    Args:
        tensors: Outputs of an op, and arguments that it wrote.
        start: What `next_sequence` gave before the op ran.

    Returns:
        The nodes in the order in which they were made; and the AccumulateGrad nodes that they lead
        to, directly or through nodes of the driver's.
    """
    return new_nodes_behind([node_of(tensor) for tensor in tensors], start)


def new_nodes_behind(nodes: Sequence[Any], start: int) -> tuple[list[Any], list[Any]]:
    """Return the same, from the nodes of the tensors; None for a tensor that has none."""
    found: list[Any] = []
    leaves: dict[Any, None] = {}
    seen: set[Any] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, OWN_NODES):
            # An edited or tapped value: the op ends here, its leaf may lie behind.
            leaves.update((leaf, None) for leaf in _leaves_behind(node))
            continue
        number = sequence_number(node)
        if number >= _LIMIT:
            if isinstance(node, AccumulateGrad):
                leaves[node] = None
        elif number >= start:
            found.append(node)
            queue.extend(node for node, _ in node.next_functions)
    found.sort(key=sequence_number)
    return found, list(leaves)


def edge_of(tensor: torch.Tensor, *, edited: bool = False) -> Edge:
    """Return where the gradient of a tensor goes; for a leaf in the form of `edges_from`.

    Args:
        tensor: It requires a gradient.
        edited: It may stand in for a leaf, whose gradient it then passes on.
    """
    node = node_of(tensor)
    if node is not None:
        return node, output_number(tensor)
    if not edited:
        return _LEAF, id(tensor)
    with torch.enable_grad(), unheard([tensor]):
        view: Any = tensor.view_as(tensor).grad_fn
    return _LEAF, id(view.next_functions[0][0].variable)


def edges_from(node: Any) -> list[Edge]:
    """Where the results of a node go, in their order."""
    return [
        (_LEAF, id(following.variable)) if isinstance(following, AccumulateGrad) else (following, n)
        for following, n in node.next_functions
    ]


def route(output: torch.Tensor, node: Any, start: int) -> tuple[Any, ...] | None:
    """The way from an op's output to one of the op's nodes.

    Args:
        output: The output.
        node: The node.
        start: What `next_sequence` gave before the op ran.

    Returns:
        Which edge to follow from each node, the types of the nodes, both ends included, and the
        number of the node among those that the op made; None where it is far.
    """
    ways: list[tuple[Any, tuple[int, ...], tuple[type, ...]]] = [(node_of(output), (), ())]
    for _ in range(_FAR):
        further = []
        for at, edges, kinds in ways:
            if at is None or isinstance(at, OWN_NODES):
                continue
            if at is node:
                return edges, (*kinds, type(at)), sequence_number(at) - start
            for index, (following, _) in enumerate(at.next_functions):
                further.append((following, (*edges, index), (*kinds, type(at))))
        ways = further
    return None


def differentiable(values: Sequence[Any]) -> dict[Slot, torch.Tensor]:
    """The tensors among values, and in lists of them, that are differentiable, by slot."""
    found: dict[Slot, torch.Tensor] = {}
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            if is_differentiable(value):
                found[position, None] = value
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                if isinstance(item, torch.Tensor) and is_differentiable(item):
                    found[position, index] = item
    return found


def placed(values: Sequence[Any], slots: Sequence[Slot], tensors: Sequence[Any]) -> list[Any]:
    """`values` with `tensors` at `slots`; lists of them are copied."""
    new = list(values)
    for (position, index), tensor in zip(slots, tensors, strict=True):
        if index is None:
            new[position] = tensor
        else:
            items = list(new[position])
            items[index] = tensor
            new[position] = items
    return new


def made(bound: BoundCall, outputs: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors whose nodes an op made: its outputs and what it wrote."""
    written = tensors_in(bound.values[position] for position in bound.signature.mutated)
    # Writing a view makes a node of its base; the view's own is made by who looks at it next.
    tensors = []
    for tensor in written:
        base = base_of(tensor)
        tensors.append(tensor if base is None else base)
    # An input that is handed back got no node, unless the op's signature is not known.
    old = {id(t) for t in (tensors_in(bound.values) if bound.bound else written)}
    tensors += (t for t in tensors_in(outputs) if id(t) not in old)
    return [t for t in tensors if requires_grad(t)]
