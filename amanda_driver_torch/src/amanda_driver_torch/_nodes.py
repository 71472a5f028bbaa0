"""Autograd nodes as operators: which nodes an op made, and the raw operator that users see.

Owns the walk from an op's outputs to its own nodes and `BackwardOp`. Registers nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from amanda_driver_torch._autograd import OWN_NODES
from amanda_driver_torch._signature import BoundCall

__all__ = [
    "BackwardOp",
    "Edge",
    "Slot",
    "differentiable",
    "made",
    "name_of",
    "new_nodes",
    "next_sequence",
    "placed",
    "route",
    "tensors_in",
]

#: Node and number of one of its gradient arguments.
Edge = tuple[Any, int]

#: Where a tensor stands: (position, None), or (position, i) for the i-th of a list.
Slot = tuple[int, int | None]

#: The sequence number that the next node of this thread will get (0.04 us).
next_sequence = torch._C._autograd._get_sequence_nr

# Nodes of ops count up from 0; AccumulateGrad has 2**64 - 1 and the driver's own lie in between.
_LIMIT = 2**61

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
        node = torch._C._current_autograd_node()
        return node if node is not None and name_of(node) == self.__name__ else None

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """The node's edges towards the leaves, during the call of a routine."""
        node = self.node
        return () if node is None else node.next_functions


def name_of(node: Any) -> str:
    """The node's name as users see it; some carry their C++ namespace (`CopySlices`)."""
    return str(node.name()).rpartition("::")[2]


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
        elif hasattr(following, "variable"):
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
    found: list[Any] = []
    leaves: dict[Any, None] = {}
    seen: set[Any] = set()
    queue = [tensor.grad_fn for tensor in tensors]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, OWN_NODES):
            # An edited or tapped value: the op ends here, its leaf may lie behind.
            leaves.update((leaf, None) for leaf in _leaves_behind(node))
            continue
        number = node._sequence_nr()
        if number >= _LIMIT:
            if hasattr(node, "variable"):
                leaves[node] = None
        elif number >= start:
            found.append(node)
            queue.extend(node for node, _ in node.next_functions)
    found.sort(key=lambda node: node._sequence_nr())
    return found, list(leaves)


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
    ways: list[tuple[Any, tuple[int, ...], tuple[type, ...]]] = [(output.grad_fn, (), ())]
    for _ in range(_FAR):
        further = []
        for at, edges, kinds in ways:
            if at is None or isinstance(at, OWN_NODES):
                continue
            if at is node:
                return edges, (*kinds, type(at)), at._sequence_nr() - start
            for index, (following, _) in enumerate(at.next_functions):
                further.append((following, (*edges, index), (*kinds, type(at))))
        ways = further
    return None


def differentiable(values: Sequence[Any]) -> dict[Slot, torch.Tensor]:
    """The tensors among values, and in lists of them, that require a gradient, by slot."""
    found: dict[Slot, torch.Tensor] = {}
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                found[position, None] = value
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                if isinstance(item, torch.Tensor) and item.requires_grad:
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
    tensors = [t if t._base is None else t._base for t in written]
    tensors += (t for t in tensors_in(outputs) if not any(t is w for w in written))
    return [t for t in tensors if t.requires_grad]
