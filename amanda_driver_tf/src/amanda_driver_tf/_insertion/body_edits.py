"""`BodyEdits`: what was changed in one body so far, as all who rewrite it see it.

Owns the new nodes, which value an ordinary reader gets, and what forward ops saw. It decides
nothing: what stands at an op, `insertions` says, what at a gradient, `derivatives`, and in what
order nodes are visited, `body_rewriting`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from amanda_core.errors import UnsupportedError
from amanda_core.plan import Step
from amanda_driver_tf._graphs.analysis import Analysis
from amanda_driver_tf._graphs.body import Body, Node, Value, is_ref
from amanda_driver_tf._graphs.frames import ENTERS, Frames
from amanda_driver_tf._graphs.kernels import keeps_state
from amanda_driver_tf._graphs.records import Record, Records, children_of
from amanda_driver_tf._insertion.keepalive import Kept
from amanda_driver_tf._insertion.nodes import Flat, Host, Inlined, New
from amanda_driver_tf._insertion.staging import trace
from amanda_driver_tf._insertion.versions import Foreign, Seen
from amanda_driver_tf._tensorflow_internals.objects import control_flow_context

__all__ = ["BodyEdits", "Surroundings"]


@dataclass(frozen=True)
class Surroundings:
    """What is known of a body from outside of it.

    Attributes:
        foreign: The forward program of a body of gradients.
        unpaired: Whether somebody who calls it computes gradients that nobody has noted.
        differentiated_inside: Numbers of ops whose gradients are computed in functions that it
            runs.
        is_differentiated: Whether gradients go through the call of it.
        refused: Why edits cannot stand in it: routines look, and must not edit.
    """

    foreign: Foreign = field(default_factory=Foreign)
    unpaired: bool = False
    differentiated_inside: Collection[int] = ()
    is_differentiated: bool = False
    refused: UnsupportedError | None = None


class BodyEdits:
    """The edits of one body.

    Args:
        body: The body; it is changed.
        analysis: Plans of its ops.
        around: What is known of it from outside.
        visit: Rewrites a node, and what it reads before it, if that was not done yet.

    Attributes:
        records: The gradients that were built in its graph.
        frames: The frames of its loops; None where there are none.
        new: The new nodes.
        kept: What must run though nothing reads it.
        changed: Whether anything was inserted or rewired.
        edited: Whether any of that may change a value.
        unpaired: Whether there are gradients of this body that nobody has noted: no edit is safe
            then.
        named: Ops with a gradient in this body of which only the pairing is known.
        is_differentiated: Whether some gradient of this body is computed.
        beside: New node (by identity) -> the node that it stands at.
        unheard: What the tools asked for and do not get in this body -> why.
    """

    def __init__(
        self, body: Body, analysis: Analysis, around: Surroundings, visit: Callable[[Any], None]
    ) -> None:
        self.body, self.analysis, self.around, self.visit = body, analysis, around, visit
        self.records = Records.of(body.graph)
        # Functions have new loops.
        has_frames = body.fdef is None and any(node.op_type in ENTERS for node in body.nodes)
        self.frames = Frames(body) if has_frames else None
        self.new: list[New] = []
        self.kept = Kept(body)
        self.changed = self.edited = False
        self.unpaired = around.unpaired or bool(self.records and self.records.has_unpaired())
        self.named = {
            owner.forward.name
            for owner in map(self.owner, (node.op for node in body.nodes))
            if owner is not None and owner.is_named
        }
        self.is_differentiated = (
            around.is_differentiated or self.records is not None or bool(children_of(body.graph))
        )
        self.beside: dict[int, Node] = {}
        self.unheard: dict[str, str] = {}
        self._visible: dict[Value, Value] = {}
        self._seen: dict[int, Seen] = {}

    # The body.

    def owner(self, op: Any) -> Record | None:
        """Return the gradient whose function made an op; None for other ops."""
        return self.records.owner(op) if self.records is not None else None

    def is_in_frame(self, node: Node) -> bool:
        """Return True if a node runs in a loop of TensorFlow 1."""
        return self.frames is not None and bool(self.frames.of(node))

    def keeps_state(self, node: Node) -> bool:
        """Return True if a session would give a clone of a node another state."""
        return (
            self.body.fdef is None
            and keeps_state(node.op_type)
            and control_flow_context(node.op) is None
        )

    # Values.

    def visible(self, value: Value) -> Value:
        """Return what an ordinary reader of a value gets."""
        return self._visible.get(value, value)

    def show(self, original: Value, new: Value) -> None:
        """Let ordinary readers of a value get another one."""
        if new != original:
            self._visible[original] = new

    def plain(self, value: Value) -> Value:
        """Return a value without `Identity` ops; to TensorFlow, too, they are what they read."""
        while (
            isinstance(value.node, Node)
            and value.node.op_type == "Identity"
            and self.visible(value) == value
        ):
            value = value.node.inputs[0]
        return value

    def carries(self, tensor: Any, wanted: Value) -> bool:
        """Return True if an ordinary reader of a tensor gets the version that is wanted."""
        value = self.body.value_of(tensor)
        return value is not None and self.plain(self.visible(value)) == self.plain(wanted)

    def seen(self, op: Any) -> Seen | None:
        """Return what a forward op saw and made; None if it is not in this body."""
        known = self._seen.get(id(op))
        if known is None:
            node = self.body.node_of(op)
            known = Seen(op, node.inputs, node.outputs()) if node is not None else None
        return known

    def note_seen(self, seen: Seen) -> None:
        """Note what an op saw and made."""
        self._seen[id(seen.op)] = seen

    # New nodes.

    def add(self, made: New, node: Node | None = None) -> list[Value]:
        """Put a new node in, which stands at a node if one is given."""
        if node is not None:
            self.beside[id(made)] = node
        self.new.append(made)
        self.changed = self.edited = True
        return made.outputs()

    def wire(self, node: Node, inputs: list[Value]) -> None:
        """Let a node read other values."""
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
        behind: bool = False,
    ) -> list[Value]:
        """Insert what a step computes.

        Args:
            name: What the node is to be called.
            flat: The function.
            inputs: What it gets.
            dtypes: DataTypes of what it returns.
            step: The step, or the first of several.
            node: The node that it stands at, if at one.
            behind: Whether it stands behind that node.
        """
        plain = [dtype - 100 if is_ref(dtype) else dtype for dtype in dtypes]
        made: New
        if step.action.staged:
            made = Inlined(name, trace(name, flat, inputs), inputs, plain)
        else:
            made = Host(name, flat, inputs, plain)
        values = self.add(made, node)
        if node is not None and behind and (not inputs or node.op.op_def.is_stateful):
            made.controls.append(node.name)
            self.kept.add(made)
        elif node is not None and behind:
            self.kept.add_behind(made, node)
        elif node is not None:
            # What the node waits for has happened before anything that runs before it.
            made.controls += node.controls
            if not inputs:
                node.controls.append(made)
        return values
