"""`BodyEdits`: the changes made to one body so far, shared by everything that rewrites it.

Owns the new nodes, the version of each value that ordinary readers get, and the values that forward
ops ran on. It makes no decisions: `insertions` decides what is inserted at an op, `derivatives`
what is inserted at a gradient, and `body_rewriting` in which order nodes are visited.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from amanda_core.driver_kit import Step
from amanda_core.interface import UnsupportedError
from amanda_driver_tf.graphs.analysis import Analysis
from amanda_driver_tf.graphs.body import Body, Node, Value, is_ref
from amanda_driver_tf.graphs.function_graphs import children_of
from amanda_driver_tf.graphs.kernel_state import keeps_state
from amanda_driver_tf.graphs.loop_frames import ENTERS, Frames
from amanda_driver_tf.graphs.records import Record, Records
from amanda_driver_tf.insertion.keepalive import Keepalive
from amanda_driver_tf.insertion.nodes import Flat, Host, Inlined, New
from amanda_driver_tf.insertion.op_values import ForwardProgram, OpValues
from amanda_driver_tf.insertion.staging import trace
from amanda_driver_tf.tensorflow_internals.objects import control_flow_context, operation_number

__all__ = ["BodyEdits", "Surroundings"]


@dataclass(frozen=True)
class Surroundings:
    """Facts about a body that come from its callers.

    Attributes:
        forward_program: Access to the forward program, if this is the body of a gradient.
        unpaired: Whether a caller computes gradients of this body that were not recorded.
        followed: Whether a forward accumulator computes tangents in a caller.
        differentiated_inside: Numbers of ops whose gradients are computed in functions that this
            body calls.
        is_differentiated: Whether gradients flow through the call of this body.
        refused: Why values in this body cannot be edited. If set, routines only observe.
    """

    forward_program: ForwardProgram = field(default_factory=ForwardProgram)
    unpaired: bool = False
    followed: bool = False
    differentiated_inside: Collection[int] = ()
    is_differentiated: bool = False
    refused: UnsupportedError | None = None


class BodyEdits:
    """The edits of one body.

    Args:
        body: The body; it is changed in place.
        analysis: Plans of its ops.
        around: Facts that come from its callers.
        visit: Rewrites a node, and everything it reads, unless that is done already.

    Attributes:
        records: The gradients that were built in its graph.
        frames: The frames of its TensorFlow 1 loops; None if it has none.
        new: The new nodes.
        kept: Nodes that must run though nothing reads them.
        changed: Whether anything was inserted or rewired.
        edited: Whether any of these changes may change a value.
        unpaired: Whether this body has gradients that were not recorded, which makes edits unsafe.
        followed: Whether a forward accumulator computes tangents here, which cannot follow edits.
        named: Names of ops whose gradient in this body is known from op names only.
        is_differentiated: Whether any gradient of this body is computed.
        beside: New node (by identity) -> the node it was inserted at.
        unmet_requests: What the tools requested but do not get in this body -> the reason.
    """

    def __init__(
        self, body: Body, analysis: Analysis, around: Surroundings, visit: Callable[[Any], None]
    ) -> None:
        self.body, self.analysis, self.around, self.visit = body, analysis, around, visit
        self.records = Records.of(body.graph)
        # Loops inside functions are TensorFlow 2 loops, which have no frames.
        has_frames = body.fdef is None and any(node.op_type in ENTERS for node in body.nodes)
        self.frames = Frames(body) if has_frames else None
        self.new: list[New] = []
        self.kept = Keepalive(body)
        self.changed = self.edited = False
        self.unpaired = around.unpaired or bool(self.records and self.records.has_unpaired())
        self.followed = around.followed or bool(self.records and self.records.is_followed())
        self.named = {
            owner.forward.name
            for owner in map(self.owner, (node.op for node in body.nodes))
            if owner is not None and owner.is_named
        }
        self.is_differentiated = (
            around.is_differentiated or self.records is not None or bool(children_of(body.graph))
        )
        self.beside: dict[int, Node] = {}
        self.unmet_requests: dict[str, str] = {}
        self._visible: dict[Value, Value] = {}
        #: Value that layers take or return -> number of the first reader, and its version.
        self._versions: dict[Value, Sequence[tuple[int, Value]]] = {}
        self._seen: dict[int, OpValues] = {}

    # The body.

    def owner(self, op: Any) -> Record | None:
        """Return the gradient whose gradient function made an op; None for other ops."""
        return self.records.owner(op) if self.records is not None else None

    def is_in_frame(self, node: Node) -> bool:
        """Return True if a node runs in a TensorFlow 1 loop."""
        return self.frames is not None and bool(self.frames.of(node))

    def keeps_state(self, node: Node) -> bool:
        """Return True if cloning a node would give the clone a kernel state of its own."""
        return (
            self.body.fdef is None
            and keeps_state(node.op_type)
            and control_flow_context(node.op) is None
        )

    def is_dropped(self, node: Node) -> bool:
        """Return True if TensorFlow would not run a node that the wiring requests."""
        return id(node) in self.body.dropped

    # Values.

    def visible(self, value: Value) -> Value:
        """Return the version of a value that an ordinary reader gets."""
        return self._visible.get(value, value)

    def visible_to(self, value: Value, reader: Node | None) -> Value:
        """Return the version that a reader gets; None for the last one."""
        versions = self._versions.get(value)
        if versions is None or reader is None:
            return self.visible(value)
        number = operation_number(reader.op)
        return [version for first, version in versions if first <= number][-1]

    def show_versions(self, original: Value, versions: Sequence[tuple[int, Value]]) -> None:
        """Give the readers of `original` versions by their numbers, and the last one to others."""
        if any(version != versions[0][1] for _, version in versions):
            self._versions[original] = versions
            self.show(original, versions[-1][1])

    def show(self, original: Value, new: Value) -> None:
        """Make ordinary readers of `original` read `new` instead."""
        if new != original:
            self._visible[original] = new

    def plain(self, value: Value) -> Value:
        """Skip `Identity` ops, which TensorFlow treats as equal to their input, too."""
        while (
            isinstance(value.node, Node)
            and value.node.op_type == "Identity"
            and self.visible(value) == value
        ):
            value = value.node.inputs[0]
        return value

    def carries(self, tensor: Any, wanted: Value) -> bool:
        """Return True if an ordinary reader of a tensor gets the version `wanted`."""
        value = self.body.value_of(tensor)
        return value is not None and self.plain(self.visible(value)) == self.plain(wanted)

    def seen(self, op: Any) -> OpValues | None:
        """Return the values a forward op ran on and produced; None if it is not in this body."""
        known = self._seen.get(id(op))
        if known is None:
            node = self.body.node_of(op)
            known = OpValues(op, node.inputs, node.outputs()) if node is not None else None
        return known

    def note_seen(self, seen: OpValues) -> None:
        """Remember the values that an op ran on and produced."""
        self._seen[id(seen.op)] = seen

    # New nodes.

    def add(self, made: New, node: Node | None = None) -> list[Value]:
        """Insert a new node, at `node` if one is given, and return its outputs."""
        if node is not None:
            self.beside[id(made)] = node
        self.new.append(made)
        self.changed = self.edited = True
        return made.outputs()

    def wire(self, node: Node, inputs: list[Value]) -> None:
        """Set the inputs of a node."""
        if inputs != node.inputs:
            node.inputs = inputs
            self.changed = True

    def insert(
        self,
        name: str,
        flat: Flat,
        inputs: list[Value],
        dtypes: Sequence[int],
        step: Step,
        node: Node | None = None,
        after: bool = False,
    ) -> list[Value]:
        """Insert a node that computes one or more steps, and return its outputs.

        Args:
            name: The wished name of the node.
            flat: The function to compute.
            inputs: Its inputs.
            dtypes: DataTypes of its outputs.
            step: The step, or the first of several.
            node: The node to insert it at, if any.
            after: Whether to insert it after `node` rather than before.
        """
        plain = [dtype - 100 if is_ref(dtype) else dtype for dtype in dtypes]
        made: New
        if step.action.staged:
            made = Inlined(name, trace(name, flat, inputs), inputs, plain)
        else:
            made = Host(name, flat, inputs, plain)
        values = self.add(made, node)
        if node is not None and after and (not inputs or node.op.op_def.is_stateful):
            made.controls.append(node.name)
            self.kept.add(made)
        elif node is not None and after:
            self.kept.add_after(made, node)
        elif node is not None:
            # A routine before an op must not run until the op's control inputs have.
            made.controls += node.controls
            if not inputs:
                node.controls.append(made)
        return values
