"""Loops of TensorFlow 1 are frames in one graph: what keeps new nodes in the frame of their op.

Owns that, so that a new node runs as often as the op that it stands at.
"""

from __future__ import annotations

from amanda_driver_tf._graphs.body import Node, Value
from amanda_driver_tf._graphs.frames import ENTERS
from amanda_driver_tf._insertion.body_edits import BodyEdits
from amanda_driver_tf._insertion.definitions import attr_type
from amanda_driver_tf._insertion.nodes import Host, Inlined, New, Plain
from amanda_driver_tf._tensorflow_internals.objects import control_flow_context

__all__ = ["keep_in_frames"]


def keep_in_frames(edits: BodyEdits) -> None:
    """Make all new nodes run in the frame that they stand in, as often as their ops."""
    if edits.frames is None:
        return
    settled: list[New] = []
    for made in edits.new:
        if isinstance(made, (Host, Inlined)) and edits.frames.behind(made):
            if made.inputs and not made.controls and all(map(_is_invariant, made.inputs)):
                # What enters a loop once is there in each turn, also in the one that ends it.
                settled += _wait(made, edits)
            if isinstance(made, Inlined):
                # Without it, constants inside would stand outside of all frames.
                made.anchor = _anchor(made)
                made.controls.append(made.anchor)
                settled.append(made.anchor)
        settled.append(made)
    edits.new[:] = settled


def _wait(made: New, edits: BodyEdits) -> list[New]:
    """Make a node that reads nothing but invariants run when its op does."""
    node = edits.beside.get(id(made))
    if node is None:
        # At a gradient, of which the records say where it is computed.
        flow = control_flow_context(made.inputs[0].node.op)
        made.controls.append(flow.GetControlPivot().op.name)
        return []
    for tensor in node.op.inputs:
        value = edits.body.value_of(tensor)
        if value is not None and not _is_invariant(value):
            # Not what the node reads now: that may be another one that is to wait.
            identity = _identity("turn", edits.visible(value))
            made.controls.append(identity)
            return [identity]
    return []


def _anchor(made: Inlined) -> Plain:
    """A node in the frame of a call, alive when it is."""
    if not made.inputs:
        anchor = Plain("frame", "NoOp", [], [], {}, [])
        anchor.controls += made.controls
        return anchor
    return _identity("frame", made.inputs[0])


def _identity(name: str, value: Value) -> Plain:
    return Plain(name, "Identity", [value], [value.base], {"T": attr_type(value.base)}, [])


def _is_invariant(value: Value) -> bool:
    return (
        isinstance(value.node, Node)
        and value.node.op_type in ENTERS
        and bool(value.node.op.node_def.attr["is_constant"].b)
    )
