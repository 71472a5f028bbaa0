"""Where the gradients of several inputs of an op meet: one node that gives all of them.

Owns the search for that node among those of an op, and what turns its results into the gradients
of the inputs. Registers nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from amanda_driver_torch._nodes import Edge, Slot, name_of

__all__ = ["Meeting", "Result", "meeting"]

#: Nodes that only change the shape of a gradient, and how a result of the node before them is to
#: be changed likewise.
_RESHAPING = {
    "ViewBackward0": "reshape",
    "UnsafeViewBackward0": "reshape",
    "ReshapeAliasBackward0": "reshape",
    "TBackward0": "t",
}


class Result(NamedTuple):
    """One result of a node.

    Attributes:
        number: Its number.
        way: ``reshape`` or ``t`` where it becomes the input's gradient by that; else empty.
    """

    number: int
    way: str

    def given(
        self, value: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """The gradient of an input of `shape` and `dtype`, out of this result of the node."""
        if value is None or value.is_nested:
            return value
        if self.way:
            value = value.t() if self.way == "t" else value.reshape(shape)
        elif value.shape != shape:
            # A node may leave it to the engine to sum what was broadcast, and to convert it.
            value = value.sum_to_size(shape)
        return value if value.dtype == dtype else value.to(dtype)

    def back(self, gradient: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor | None:
        """What stands for `value`, this result of the node, so that the input gets `gradient`."""
        if gradient is None or not self.way:
            return gradient
        return gradient.t() if self.way == "t" else gradient.reshape(value.shape)


class Meeting(NamedTuple):
    """A node at which gradients meet.

    Attributes:
        node: The node.
        results: Slot of an input -> the result that is its gradient.
    """

    node: Any
    results: dict[Slot, Result]


def meeting(nodes: Sequence[Any], edges: Mapping[Slot, Edge]) -> Meeting | None:
    """The one of `nodes` that gives the gradients of all `edges`; None where there is none.

    Args:
        nodes: The nodes that an op made.
        edges: Slot of an input -> where its gradient goes.
    """
    found: dict[Slot, dict[Any, Result]] = {}
    for slot, edge in edges.items():
        origins = _leading_to(nodes, *edge)
        if len(origins) != 1:
            return None
        (node, index) = origins[0]
        found[slot] = {node: Result(index, "")}
        way = _RESHAPING.get(name_of(node))
        origins = _leading_to(nodes, node, 0) if way is not None else []
        if way is not None and len(origins) == 1:
            found[slot][origins[0][0]] = Result(origins[0][1], way)
    for node in nodes:
        if all(node in results for results in found.values()):
            return Meeting(node, {slot: results[node] for slot, results in found.items()})
    return None


def _leading_to(nodes: Sequence[Any], node: Any, number: int) -> list[tuple[Any, int]]:
    return [
        (other, index)
        for other in nodes
        for index, (following, at) in enumerate(other.next_functions)
        if following is node and at == number
    ]
