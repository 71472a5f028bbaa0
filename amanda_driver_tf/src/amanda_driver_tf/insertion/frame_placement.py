"""Keeps new nodes in the frame of their op, in TensorFlow 1 loops.

Such loops are frames in one graph. A new node has to run in the frame of the op that it was
inserted at, and as often as that op.
"""

from __future__ import annotations

from amanda_driver_tf.graphs.body import Node, Value
from amanda_driver_tf.graphs.loop_frames import ENTERS
from amanda_driver_tf.insertion.body_edits import BodyEdits
from amanda_driver_tf.insertion.function_def_writing import attr_type
from amanda_driver_tf.insertion.nodes import Host, Inlined, New, Plain
from amanda_driver_tf.tensorflow_internals.objects import control_flow_context

__all__ = ["keep_in_frames"]


def keep_in_frames(edits: BodyEdits) -> None:
    """Make each new node run in the frame of its op, once per execution of that op."""
    if edits.frames is None:
        return
    settled: list[New] = []
    for made in edits.new:
        if isinstance(made, (Host, Inlined)) and edits.frames.of_outputs(made):
            if made.inputs and not made.controls and all(map(_is_invariant, made.inputs)):
                # A loop invariant exists in every iteration, even in the one that ends the loop.
                settled += _wait(made, edits)
            if isinstance(made, Inlined):
                # Without the anchor the constants of the routine would be outside of all frames.
                made.anchor = _anchor(made)
                made.controls.append(made.anchor)
                settled.append(made.anchor)
        settled.append(made)
    edits.new[:] = settled


def _wait(made: New, edits: BodyEdits) -> list[New]:
    """Make a node that reads only loop invariants run when its op does."""
    node = edits.beside.get(id(made))
    if node is None:
        # A node at a gradient: the control flow context of the gradient is known.
        flow = control_flow_context(made.inputs[0].node.op)
        made.controls.append(flow.GetControlPivot().op.name)
        return []
    for tensor in node.op.inputs:
        value = edits.body.value_of(tensor)
        if value is not None and not _is_invariant(value):
            # Not the node's new input, which may be a node that has to wait itself.
            identity = _identity("turn", edits.visible(value))
            made.controls.append(identity)
            return [identity]
    return []


def _anchor(made: Inlined) -> Plain:
    """Return a node in the frame of `made` that is alive whenever `made` is."""
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
