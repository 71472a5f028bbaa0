"""`Keepalive`: nodes of a body that must run though nothing reads them.

TensorFlow prunes what nobody reads. Owns which nodes are kept by control outputs: nodes after ops
without outputs or with side effects, nodes after ops that run but whose new value is not read, and
calls of functions that contain such nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from amanda_driver_tf.graphs.body import Body, Node, Value
from amanda_driver_tf.graphs.pruning import reached_without_dropped
from amanda_driver_tf.insertion.nodes import New

__all__ = ["Keepalive"]


class Keepalive:
    """The nodes of one body that control outputs keep alive.

    Args:
        body: The body.

    Attributes:
        nodes: New nodes, and calls of functions that contain such nodes.
        awaited: Observers for which something waits that TensorFlow may drop, as where it cancels
            one transposition by another, and the observer with it.
    """

    def __init__(self, body: Body) -> None:
        self.nodes: list[New | Node] = []
        self.awaited: list[New] = []
        self._body = body
        #: New nodes after an op, with the node of that op. They run if anything reads them.
        self._after: list[tuple[New, Any]] = []
        #: New nodes before an op that TensorFlow would drop, with the node of that op.
        self._before: list[tuple[New, Node]] = []
        self._running: Collection[int] = ()

    def add(self, made: New) -> None:
        """Keep a new node."""
        if made not in self.nodes:
            self.nodes.append(made)

    def add_after(self, made: New, node: Any) -> None:
        """Keep `made`, which was inserted at `node`, if `node` runs and nothing reads `made`."""
        self._after.append((made, node))

    def add_before(self, made: New, node: Node) -> None:
        """Let `made` run before `node`, which TensorFlow drops, only if something new reads it."""
        self._before.append((made, node))

    def settle(self, running: Collection[int], roots: Sequence[Any]) -> None:
        """Keep observers of ops that run, and nodes after these ops that nothing reads.

        Nothing reads them if only the op's own gradient needs its value, since that reads the
        original.

        Args:
            running: Ids of the nodes that run in TensorFlow's own wiring.
            roots: What the rewritten body is run for.
        """
        self._running = running
        if self._after:
            live = self._body.reached([*roots, *self.nodes])
            run = [made for made, node in self._after if id(node) in running]
            self.nodes += [made for made in run if id(made) not in live]
            self.awaited = [made for made in run if id(made) in live and not made.dtypes]
        if self._before:
            read = reached_without_dropped(self._body, [*roots, *self.nodes])
            for made, node in self._before:
                if id(node) in read:
                    node.controls.append(made)

    def settle_passed_on(self, values: Iterable[Value]) -> None:
        """Keep nodes after ops whose original values are passed to a gradient in another body.

        The function may run for nothing else.
        """
        waiting = [value.node for value in values] if self._after else []
        passed_on_nodes: set[int] = set()
        while waiting:
            node = waiting.pop()
            if isinstance(node, New) and id(node) not in passed_on_nodes:
                waiting += [value.node for value in node.inputs]
            passed_on_nodes.add(id(node))
        for made, node in self._after:
            if id(node) in passed_on_nodes:
                self.add(made)

    def settle_call(self, node: Node) -> None:
        """Keep a call that runs, since a function that it calls contains kept nodes."""
        if id(node) in self._running and node not in self.nodes:
            self.nodes.append(node)
