"""Autograd nodes as operators: the nodes that an op made, and the raw operator shown to users.

Owns the traversal from an op's outputs to its own nodes, and `BackwardOp`. Registers no hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from amanda_driver_torch.gradients.driver_nodes import DRIVER_NODES
from amanda_driver_torch.threads.modes import call_hidden, call_with_gradients
from amanda_driver_torch.torch_internals.internals import (
    AccumulateGrad,
    current_node,
    sequence_number,
)
from amanda_driver_torch.torch_internals.tensor_attributes import (
    is_differentiable,
    node_of,
    output_number,
)

#: A node and the number of one of its gradient arguments. For a leaf, which may have no node yet:
#: a marker and the id of the tensor.
Edge = tuple[Any, int]

#: The place of a tensor in a call: (position, None), or (position, i) inside a list.
Slot = tuple[int, int | None]

# Sequence numbers of ops' nodes count up from 0, that of AccumulateGrad is 2**64 - 1, and those of
# the driver's nodes are in between.
_LIMIT = 2**61

_LEAF = "leaf"

#: A node on a path from an op's outputs: the place before it (-1 for none), the number of the edge
#: or of the output that leads to it, its type, and its number among the nodes that the op made (-1
#: if that is not compared).
Place = tuple[int, int, type, int]


class BackwardOp:
    """The raw operator of a backward context: an autograd node, by its name.

    The node itself is available only while it runs. A reference to it would keep the graph alive
    for ever, because the garbage collector cannot follow it.
    """

    __slots__ = ("__name__",)

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __repr__(self) -> str:
        return f"<{self.__name__}>"

    def name(self) -> str:
        """Return the node's name, such as ``ConvolutionBackward0``."""
        return self.__name__

    @property
    def node(self) -> Any:
        """The autograd node while a routine runs, else None."""
        node = current_node()
        return node if node is not None and name_of(node) == self.__name__ else None

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """The node's edges towards the leaves, while a routine runs."""
        node = self.node
        return () if node is None else node.next_functions


class PartOp(BackwardOp):
    """The raw operator of what has no node of its own."""

    __slots__ = ()

    @property
    def node(self) -> Any:
        """None: the node that runs is that of all parts."""
        return None


def name_of(node: Any) -> str:
    """Return a node's name without its C++ namespace, which some nodes have (`CopySlices`)."""
    # By the type, since a user's autograd function may store an attribute of this name.
    return str(type(node).name(node)).rpartition("::")[2]


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among values and in lists of them, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(tensors_in(value))
    return found


def _leaves_behind(node: Any) -> Iterator[Any]:
    for following, _ in node.next_functions:
        if isinstance(following, DRIVER_NODES):
            yield from _leaves_behind(following)
        elif isinstance(following, AccumulateGrad):
            yield following


def new_nodes(tensors: Sequence[torch.Tensor], start: int) -> tuple[list[Any], list[Any]]:
    """Return the nodes made since `start` that lead to `tensors`, and the leaves they end in.

    Args:
        tensors: Outputs of an op, and arguments that it wrote.
        start: Value of `next_sequence` before the op ran.

    Returns:
        The nodes in order of creation, and the AccumulateGrad nodes that they lead to, directly or
        through nodes of the driver.
    """
    return new_nodes_behind([node_of(tensor) for tensor in tensors], start)


def new_nodes_behind(nodes: Sequence[Any], start: int) -> tuple[list[Any], list[Any]]:
    """Return the same as `new_nodes`, given the nodes of the tensors, or None for tensors without
    one.
    """
    found: list[Any] = []
    leaves: dict[Any, None] = {}
    seen: set[Any] = set()
    queue = list(nodes)
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, DRIVER_NODES):
            # An edited or tapped value: the op ends here, but a leaf may follow.
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


def roots(tensors: Sequence[torch.Tensor], start: int) -> list[Any]:
    """Return the nodes among those of `tensors` that were made since `start`, each once."""
    nodes = dict.fromkeys(map(node_of, tensors))
    return [node for node in nodes if node and start <= sequence_number(node) < _LIMIT]


def edge_of(tensor: torch.Tensor, *, edited: bool = False) -> Edge:
    """Return the edge to which the gradient of a tensor goes, as in `edges_from`.

    Args:
        tensor: A tensor that requires a gradient.
        edited: Whether it may replace a leaf, to which it passes its gradient.
    """
    node = node_of(tensor)
    if node is not None:
        return node, output_number(tensor)
    if not edited:
        return _LEAF, id(tensor)
    view: Any = call_hidden([tensor], call_with_gradients, True, tensor.view_as, tensor).grad_fn
    return _LEAF, id(view.next_functions[0][0].variable)


def edges_from(node: Any) -> list[Edge]:
    """Return the edges of a node's results, in order."""
    return [
        (_LEAF, id(following.variable)) if isinstance(following, AccumulateGrad) else (following, n)
        for following, n in node.next_functions
    ]


def routes(
    outputs: Sequence[torch.Tensor], targets: Sequence[Any], start: int
) -> tuple[list[Place], list[int]] | None:
    """Return the paths from an op's outputs to some of its nodes, and to the leaves after them.

    Args:
        outputs: The outputs.
        targets: The nodes.
        start: Value of `next_sequence` before the op ran.

    Returns:
        The nodes on the paths, and which of them each target is; None if one cannot be reached.
    """
    origins: dict[Any, tuple[Any, int]] = {}
    queue: list[tuple[Any, int, Any]] = [(None, i, node_of(one)) for i, one in enumerate(outputs)]
    for before, edge, node in queue:  # It grows.
        if node is None or node in origins:
            continue
        is_own = start <= sequence_number(node) < _LIMIT
        if is_own or (before is not None and isinstance(node, AccumulateGrad)):
            origins[node] = before, edge
        if is_own:
            queue += [(node, i, following) for i, (following, _) in enumerate(node.next_functions)]
    if not all(target in origins for target in targets):
        return None
    places: list[Place] = []
    index: dict[Any, int] = {None: -1}
    for target in targets:
        path = []
        node = target
        while node not in index:
            path.append(node)
            node, _ = origins[node]
        for node in reversed(path):
            before, edge = origins[node]
            is_counted = node in targets and not isinstance(node, AccumulateGrad)
            number = sequence_number(node) - start if is_counted else -1
            index[node] = len(places)
            places.append((index[before], edge, type(node), number))
    return places, [index[target] for target in targets]


def differentiable(values: Sequence[Any]) -> dict[Slot, torch.Tensor]:
    """Return the differentiable tensors among values, and in lists of them, by slot."""
    return {slot: tensor for slot, tensor in by_slot(values) if is_differentiable(tensor)}


def by_slot(values: Sequence[Any]) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Yield the tensors among values, and in lists of them, with their slots."""
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            yield (position, None), value
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    yield (position, index), item


def taken(values: Sequence[Any], slots: Sequence[Slot]) -> list[Any]:
    """Return the values at `slots`; None for those in a list that is None."""
    return [
        values[position] if index is None or values[position] is None else values[position][index]
        for position, index in slots
    ]


def placed(values: Sequence[Any], slots: Sequence[Slot], tensors: Sequence[Any]) -> list[Any]:
    """Return `values` with `tensors` at `slots`; changed lists are copied."""
    new = list(values)
    for (position, index), tensor in zip(slots, tensors, strict=True):
        if index is None:
            new[position] = tensor
        else:
            items = list(new[position])
            items[index] = tensor
            new[position] = items
    return new
