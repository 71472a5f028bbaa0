"""Tensors of a graph that share memory, and the views that routines end.

A routine on the host may return its value in other memory, and a graph must know beforehand
whether it does. So it always does: the value of a view after a routine is a copy. Where routines
get the gradient of a view, autograd does not know any more that it is one. Owns which values of a
graph are not views any more, and refuses a graph whose results would depend on it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from amanda_driver_torch.compiled.choice import CannotWeave
from amanda_driver_torch.compiled.execution import OpPlan
from amanda_driver_torch.gradients.nodes import tensors_in
from amanda_driver_torch.operators.signature import BoundCall
from amanda_driver_torch.torch_internals.dynamo import tree_leaves
from amanda_driver_torch.torch_internals.internals import storage_address

__all__ = ["Aliases"]


class _Write(NamedTuple):
    """A node that writes memory, as the owner of which it does."""

    node: fx.Node
    memory: int
    owner: object


class Aliases:
    """The memory of the values of one graph.

    Values with the same memory have different owners if a routine came between them.
    """

    def __init__(self) -> None:
        #: Node -> its memory -> the owner.
        self._owners: dict[fx.Node, dict[int, object]] = {}
        #: Memory that is the same as another one, of which it is a stand-in in analysis.
        self._same: dict[int, int] = {}
        self._known: set[int] = set()
        self._writes: list[_Write] = []
        # Addresses are those of tensors that live.
        self._held: list[Any] = []
        self._written: set[int] = set()
        self._is_cut = self._is_edited = self._is_on_host = self._is_tapped = False
        # Memory of which routines get the gradient.
        self._tapped: set[int] = set()
        #: An owner that is one because a routine gets its gradient, and memory -> the one before.
        self._before: dict[tuple[object, int], object] = {}

    def begin(self, node: fx.Node) -> None:
        """Note a node, in the order of the graph, before its operators are analysed."""
        self._written = set()
        self._is_cut = self._is_edited = self._is_tapped = False
        self._owners[node] = {memory: memory for memory in self._memory(_example(node))}
        if node.op == "placeholder":
            self._known |= self._owners[node].keys()

    def show(self, node: fx.Node, shown: Any) -> None:
        """Note `shown`, a node's value in analysis, which may differ from the one Dynamo noted."""
        for old, new in zip(_example(node), tree_leaves(shown), strict=False):
            for one, other in zip(self._memory([old]), self._memory([new]), strict=False):
                if other in self._known:  # Dynamo noted a copy where there is none.
                    one, other = other, one
                if one != other:
                    self._same[other] = one
        self._owners[node] = {memory: memory for memory in self._memory(_example(node))}

    def operator(self, plan: OpPlan, bound: BoundCall, outputs: Iterable[Any]) -> None:
        """Note an operator of the current node."""
        mutated = (bound.values[i] for i in bound.signature.mutated)
        self._written |= self._memory([bound.out, *mutated])
        taps = plan.arriving or plan.leaving
        if taps and any(tensor.requires_grad for tensor in tensors_in(outputs)):
            self._is_cut = self._is_tapped = True
        self._is_edited = self._is_edited or plan.edits_on_host
        self._is_cut = self._is_cut or self._is_edited

    def note_host(self, on_host: bool) -> None:
        """Note whether a routine of the current node, perhaps in its backward, is on the host."""
        self._is_on_host = self._is_on_host or on_host

    def end(self, node: fx.Node) -> None:
        """Note what the operators of a node did."""
        owners = self._owners[node]
        if self._is_tapped:
            self._tapped |= owners.keys()
        for given in reversed(node.all_input_nodes):
            for memory, owner in self._owners.get(given, {}).items():
                if memory in self._written:
                    self._writes.append(_Write(node, memory, owner))
                if memory in owners:
                    is_cut = self._is_cut and memory not in self._written
                    owners[memory] = node if is_cut else owner
                    if is_cut and not self._is_edited:
                        self._before[node, memory] = owner
        self._known |= owners.keys()

    def check(self, graph: fx.Graph, is_broken: bool) -> bool:
        """Raise `CannotWeave` if the program expects a view where a value is none any more.

        Args:
            graph: The graph.
            is_broken: Whether the graph is before or after a graph break. It may pass on views
                whose gradients routines get.

        Returns:
            Whether it does. If the program then writes such a view, gradients are lost.
        """
        given = [
            memory
            for node in graph.nodes
            if node.op in ("placeholder", "get_attr")
            for memory in self._owners[node]
        ]
        outer: dict[int, object] = {memory: memory for memory in given}
        self._check_writes(outer, given)
        (output,) = (node for node in graph.nodes if node.op == "output")
        returned: set[int] = set()
        passes = False
        for node in output.all_input_nodes:
            for memory, owner in self._owners[node].items():
                while is_broken and (owner, memory) in self._before:
                    owner, passes = self._before[owner, memory], True
                if outer.setdefault(memory, owner) != owner or (
                    memory in self._tapped and memory in returned
                ):
                    _refuse(node)
                returned.add(memory)
        return passes

    def _check_writes(self, outer: Mapping[int, object], given: Sequence[int]) -> None:
        order = {node: number for number, node in enumerate(self._owners)}
        values: dict[int, list[tuple[fx.Node, object]]] = defaultdict(list)
        for node, owners in self._owners.items():
            for memory, owner in owners.items():
                values[memory].append((node, owner))
        for write in self._writes:
            time = order[write.node]
            for node, owner in values[write.memory]:
                is_late = any(order.get(user, len(order)) > time for user in node.users)
                if owner != write.owner and order[node] < time and is_late:
                    _refuse(write.node)
            if outer.get(write.memory, write.owner) != write.owner:
                _refuse(write.node)
            if self._is_on_host and given.count(write.memory) > 1:
                # AOTAutograd makes one argument of them, and then forgets the effects.
                raise CannotWeave(
                    "a routine runs on the host, and the program writes one of several arguments "
                    f"that share memory ({write.node.name})"
                )

    def _memory(self, values: Iterable[Any]) -> set[int]:
        tensors, found = tensors_in(values), set()
        self._held.append(tensors)
        for tensor in tensors:
            with contextlib.suppress(RuntimeError):  # Sparse and opaque layouts.
                memory = storage_address(tensor.untyped_storage())
                found.add(self._same.get(memory, memory))
        return found


def _example(node: fx.Node) -> list[Any]:
    return tree_leaves(node.meta.get("example_value"))


def _refuse(node: fx.Node) -> None:
    raise CannotWeave(
        "a routine on the host may edit, or a routine gets the gradient of, a value that shares "
        f"memory with another one, which is written or returned ({node.name})"
    )
