"""Frames: the TensorFlow 1 loop that each node of a graph runs in, read from the graph itself.

A graph imported from a GraphDef has no control flow contexts, but it has the nodes that enter
frames.
"""

from __future__ import annotations

from typing import Any

from amanda_driver_tf.graphs.body import BACK, Body, Node

__all__ = ["ENTERS", "Frame", "Frames"]

#: Op types that enter a frame.
ENTERS = ("Enter", "RefEnter")
_EXITS = ("Exit", "RefExit")

#: Names of nested frames, the outermost first; empty outside of loops.
Frame = tuple[bytes, ...]


class Frames:
    """The frames of a body and of the new nodes in it.

    Args:
        body: The body.
    """

    def __init__(self, body: Body) -> None:
        self._by_name = {node.name: node for node in body.nodes}
        self._after: dict[int, Frame] = {}

    def of_outputs(self, node: Any) -> Frame:
        """Return the frame of a node's outputs. ``node`` must stay alive."""
        path: list[Any] = []
        while id(node) not in self._after:
            path.append(node)
            source = self._source_of(node)
            if source is None:
                break
            node = source
        frame = self._after.get(id(node), ())
        for each in reversed(path):
            op_type = getattr(each, "op_type", "")
            if op_type in ENTERS:
                frame = (*frame, _name_of(each))
            elif op_type in _EXITS:
                frame = frame[:-1]
            self._after[id(each)] = frame
        return frame

    def of(self, node: Any) -> Frame:
        """Return the frame that a node belongs to; for an exit, the frame it leaves."""
        if getattr(node, "op_type", "") in _EXITS:
            return self.of_outputs(node.inputs[0].node)
        return self.of_outputs(node)

    def _source_of(self, node: Any) -> Any:
        for value in node.inputs:
            if getattr(value.node, "op_type", "") not in BACK:
                return value.node
        for control in node.controls:
            found = self._by_name.get(control) if isinstance(control, str) else control
            if found is not None:
                return found
        return None


def _name_of(node: Any) -> bytes:
    attr = node.op.node_def.attr if isinstance(node, Node) else node.attrs
    return bytes(attr["frame_name"].s)
