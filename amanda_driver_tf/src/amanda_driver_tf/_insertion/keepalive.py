"""`Kept`: what of a body must run though nothing reads it.

TensorFlow prunes what nobody reads. Owns which nodes control outputs keep: those that stand behind
ops without outputs or with effects, those behind ops whose new value nobody wants while the op
itself runs, and the calls that have such inside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from amanda_driver_tf._graphs.body import Body, Node, Value
from amanda_driver_tf._insertion.nodes import New

__all__ = ["Kept"]


class Kept:
    """What is kept of one body.

    Args:
        body: The body.

    Attributes:
        nodes: New nodes, and calls that have such inside.
    """

    def __init__(self, body: Body) -> None:
        self.nodes: list[New | Node] = []
        self._body = body
        #: New nodes behind an op, and that op's, which run as soon as something reads them.
        self._behind: list[tuple[New, Any]] = []
        self._running: Collection[int] = ()

    def add(self, made: New) -> None:
        """Keep a new node."""
        if made not in self.nodes:
            self.nodes.append(made)

    def add_behind(self, made: New, node: Any) -> None:
        """Note a new node behind another one; it is kept if that runs and nothing reads it."""
        self._behind.append((made, node))

    def settle(self, running: Collection[int], roots: Iterable[Any]) -> None:
        """Keep what stands behind ops that run, where nothing that runs reads it.

        So it is behind an op whose value only its own gradient needs, which reads the original.

        Args:
            running: Ids of the nodes that run, as TensorFlow has wired them.
            roots: What they run for, as it is now.
        """
        self._running = running
        if self._behind:
            live = self._body.reached([*roots, *self.nodes])
            self.nodes += [
                made for made, node in self._behind if id(node) in running and id(made) not in live
            ]

    def settle_handed_on(self, values: Iterable[Value]) -> None:
        """Likewise behind the ops whose original values are handed on to a gradient elsewhere.

        It may be all that the function runs for.
        """
        waiting = [value.node for value in values] if self._behind else []
        handed_on: set[int] = set()
        while waiting:
            node = waiting.pop()
            if isinstance(node, New) and id(node) not in handed_on:
                waiting += [value.node for value in node.inputs]
            handed_on.add(id(node))
        for made, node in self._behind:
            if id(node) in handed_on:
                self.add(made)

    def settle_call(self, node: Node) -> None:
        """Likewise a node that runs, in whose functions something is kept."""
        if id(node) in self._running and node not in self.nodes:
            self.nodes.append(node)
