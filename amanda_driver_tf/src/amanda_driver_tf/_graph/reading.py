"""`Reading`: which version of a value each reader gets.

A forward op's edited inputs are seen by it and by its own gradient's ops and by nobody else, its
edited outputs by all but these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from amanda_core.errors import UnsupportedError
from amanda_driver_tf._graph.analysis import is_container, is_operator
from amanda_driver_tf._graph.body import Node, Value
from amanda_driver_tf._graph.gradients import Reader
from amanda_driver_tf._graph.records import Record
from amanda_driver_tf._graph.versions import Seen, key_of, source_of
from amanda_driver_tf._tensorflow_internals.names import GRADIENT_OP_TYPE

if TYPE_CHECKING:
    from amanda_driver_tf._graph.weave import Weaver

__all__ = ["Reading"]


class Reading:
    """Answers for the readers in one body.

    Args:
        weaver: Weaves the body.

    Attributes:
        ambiguous: Gradients (by identity) whose ops read one tensor of which there are several
            versions.
    """

    def __init__(self, weaver: Weaver) -> None:
        self._weaver = weaver
        self.ambiguous: set[int] = set()
        #: Gradient (by identity) -> the nodes that its function made; once it is needed.
        self._made_by: dict[int, list[Node]] = {}

    def read(self, value: Value, reader: Node | None = None) -> Value:
        if not isinstance(value.node, Node):
            return value
        gradient = self._weaver.gradients.read(value, reader)
        return gradient if gradient is not None else self._weaver.visible(value)

    def again(self, value: Value, node: Node, owner: Record | None) -> Value:
        """Return what a forward op reads, or sees if a gradient runs it again.

        Some gradients of gradients, as that of `FusedBatchNormGrad`, differentiate a formula.
        """
        if owner is not None and isinstance(value.node, Node):
            forward = owner.forward
            elsewhere = forward.graph is not self._weaver.body.graph
            made = value.node.op.outputs[value.slot]
            tensor = self._weaver.foreign.tensor(value) if elsewhere else made
            if any(tensor is each for each in (*forward.inputs, *forward.outputs)):
                return self.in_gradient(value, owner)
        return self.read(value, node)

    def in_gradient(self, value: Value, owner: Record, reader: Reader | None = None) -> Value:
        """Return what an op of a gradient function reads, or what that function returns.

        Args:
            value: What it reads as TensorFlow has wired it.
            owner: The gradient.
            reader: The op, and which input of it this is; None for what is returned.
        """
        if not isinstance(value.node, Node):
            return value
        elsewhere = owner.forward.graph is not self._weaver.body.graph
        tensor = self._weaver.foreign.tensor(value) if elsewhere else None
        gradient = self._weaver.gradients.in_function(value, owner, reader)
        if gradient is not None:
            same = tensor if elsewhere else value.node.op.outputs[value.slot]
            forward = owner.forward
            if same is not None and any(same is one for one in (*forward.inputs, *forward.outputs)):
                if tensor is not None:
                    read = self._read_foreign(value, tensor, owner)
                else:
                    read = self.version(same, owner) or self._weaver.visible(value)
                self._tell_apart(read, gradient, owner)
            return gradient
        if tensor is not None:
            return self._read_foreign(value, tensor, owner)
        led = self._weaver.loops.read(value, owner)
        if led is not None:
            return led
        if self._weaver.owner(value.node.op) is owner:
            return self._weaver.visible(value)
        made = value.node.op.outputs[value.slot]
        if value.node.is_argument and any(made is each for each in owner.forward.outputs):
            return self._weaver.visible(value)  # It is fed, whatever the op would make.
        version = self.version(made, owner)
        return version if version is not None else self._weaver.visible(value)

    def _tell_apart(self, version: Value, gradient: Value, owner: Record) -> None:
        """Note that a gradient of an op is a tensor that the op reads or makes, too.

        It is where a differentiation begins with it (`output_gradients`), and where a custom
        gradient returns it.
        """
        if self.plain(version) == self.plain(gradient):
            return
        if not _is_derivable(owner.forward):
            raise UnsupportedError(
                f"One tensor is a gradient that arrives at {owner.forward.name!r}, and what the op "
                "reads or makes; it was edited, and the op's gradient does not say which it means",
                fix="Begin with a tf.identity of it as output_gradients",
            )
        self.ambiguous.add(id(owner))

    def note_anew(self, owner: Record) -> None:
        """Note that the ops of a gradient run no more, and with them what is inserted at them."""
        if not self._made_by:
            for node in self._weaver.body.nodes:
                made_by = self._weaver.owner(node.op)
                if made_by is not None:
                    self._made_by.setdefault(id(made_by), []).append(node)
        for node in self._made_by.get(id(owner), ()):
            plans = self._weaver.analysis.plans_of(node.op) if is_operator(node.op_type) else None
            if plans is not None and (plans.before or plans.after):
                self._weaver.unheard[f"routines at {node.name!r}, a backward op"] = (
                    f"the gradient of {owner.forward.name!r} is computed anew, as it reads one "
                    "tensor that the op has seen in several versions"
                )

    def version(self, tensor: Any, owner: Record) -> Value | None:
        """Return the version of a tensor of this body that the forward op read, or None."""
        forward = self._weaver.body.node_of(owner.forward)
        if forward is not None:
            self._weaver.visit(forward)
        seen = self._weaver.seen(owner.forward)
        return self._version(tensor, owner, seen) if seen is not None else None

    def _read_foreign(self, value: Value, tensor: Any, owner: Record) -> Value:
        if tensor.dtype == tf.resource:
            return self._weaver.visible(
                value
            )  # There are no lists of them, which loops would need.
        seen = self._weaver.foreign.seen(owner.forward)
        wanted = self._version(tensor, owner, seen) if seen is not None else None
        if wanted is None or self._weaver.foreign.carries(tensor, wanted):
            return self._weaver.visible(value)
        self._weaver.changed = True
        return self._weaver.foreign.bring(wanted)

    def _version(self, tensor: Any, owner: Record, seen: Seen) -> Value | None:
        """The version of a tensor that the op of a gradient saw; None if it saw it not at all."""
        forward = owner.forward
        read_by = list(zip(forward.inputs, seen.inputs, strict=False))
        key, source = key_of(tensor), key_of(source_of(tensor))
        exact = [version for read, version in read_by if key_of(read) == key]
        # A gradient's loop is led one tensor for a value and for all identities of it.
        versions = [version for read, version in read_by if key_of(source_of(read)) == source]
        if len({self.plain(version) for version in versions}) > 1:
            # One tensor at several positions, edited differently: the gradient's ops do not say
            # which one they mean.
            if not _is_derivable(forward):
                if self._is_looped(forward) or len({self.plain(each) for each in exact}) != 1:
                    raise UnsupportedError(
                        f"{forward.name!r} reads a value twice, or an Identity of it, too; they "
                        "were edited differently, and its gradient does not say which it means",
                        fix="Edit them alike, or the ops that make the value",
                    )
                return exact[0]
            # The op is differentiated once more for it.
            self.ambiguous.add(id(owner))
        if versions:
            return (exact or versions)[0]
        for index, made in enumerate(forward.outputs[: len(seen.outputs)]):
            if key_of(made) == key_of(tensor):
                return seen.outputs[index]
        return None

    def _is_looped(self, forward: Any) -> bool:
        """Return True if what a gradient reads of an op comes from the iterations of a loop."""
        node = self._weaver.body.node_of(forward)
        return (
            self._weaver.loops.is_in_frame(node)
            if node is not None
            else self._weaver.foreign.is_looped
        )

    def carries(self, tensor: Any, wanted: Value) -> bool:
        """Return True if an ordinary reader of a tensor gets the version that is wanted."""
        value = self._weaver.body.value_of(tensor)
        return value is not None and self.plain(self._weaver.visible(value)) == self.plain(wanted)

    def plain(self, value: Value) -> Value:
        """A value without `Identity` ops, which TensorFlow, too, takes for what they read."""
        while (
            isinstance(value.node, Node)
            and value.node.op_type == "Identity"
            and self._weaver.visible(value) == value
        ):
            value = value.node.inputs[0]
        return value


def _is_derivable(op: Any) -> bool:
    """Return True if the gradient of an op can be derived again, for this op alone.

    Not if the op runs functions or has a custom gradient: both hold tensors of the op's graph.
    """
    return not is_container(op.type) and GRADIENT_OP_TYPE not in op.node_def.attr
