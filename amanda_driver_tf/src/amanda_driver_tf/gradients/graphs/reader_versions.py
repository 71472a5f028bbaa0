"""`ReaderVersions`: which version of a value each reader gets.

The edited inputs of a forward op are read by that op and by the ops of its own gradient, and by
nobody else. Its edited outputs are read by everybody except the ops of its own gradient.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from amanda_core.interface import UnsupportedError
from amanda_driver_tf.gradients.graphs.gradient_versions import GradientVersions, Reader
from amanda_driver_tf.gradients.graphs.op_versions import OpVersions, is_derivable
from amanda_driver_tf.graphs.body import Node, Value
from amanda_driver_tf.graphs.records import Record
from amanda_driver_tf.insertion.body_edits import BodyEdits

__all__ = ["ReaderVersions"]


class ReaderVersions:
    """The versions that the readers in one body get.

    Args:
        edits: The edits of the body.
        versions: The versions that its ops ran on.
        gradients: Its gradients.
    """

    def __init__(self, edits: BodyEdits, versions: OpVersions, gradients: GradientVersions) -> None:
        self._edits, self._versions, self._gradients = edits, versions, gradients

    def read(self, value: Value, reader: Node | None = None) -> Value:
        """Return the version that an ordinary reader gets; None as reader if it is fetched or
        returned.
        """
        if not isinstance(value.node, Node):
            return value
        gradient = self._gradients.read(value, reader)
        return gradient if gradient is not None else self._edits.visible_to(value, reader)

    def again(self, value: Value, node: Node, owner: Record | None) -> Value:
        """Return the version that a forward op reads, also if a gradient function made that op.

        Some gradients of gradients, such as that of `FusedBatchNormGrad`, differentiate a formula
        made of forward ops. These read what the original op ran on.
        """
        if owner is not None and isinstance(value.node, Node):
            forward = owner.forward
            elsewhere = forward.graph is not self._edits.body.graph
            made = value.node.op.outputs[value.slot]
            tensor = self._edits.around.forward_program.tensor(value) if elsewhere else made
            if any(tensor is each for each in (*forward.inputs, *forward.outputs)):
                return self.in_gradient(value, owner)
        return self.read(value, node)

    def in_gradient(self, value: Value, owner: Record, reader: Reader | None = None) -> Value:
        """Return the version that an op of a gradient function reads, or that the function returns.

        Args:
            value: The value in TensorFlow's wiring.
            owner: The gradient.
            reader: The op and its input; None for a returned value.
        """
        if not isinstance(value.node, Node):
            return value
        elsewhere = owner.forward.graph is not self._edits.body.graph
        tensor = self._edits.around.forward_program.tensor(value) if elsewhere else None
        gradient = self._gradients.in_function(value, owner, reader)
        if gradient is not None:
            same = tensor if elsewhere else value.node.op.outputs[value.slot]
            forward = owner.forward
            if same is not None and any(same is one for one in (*forward.inputs, *forward.outputs)):
                if tensor is not None:
                    read = self._read_foreign(value, tensor, owner)
                else:
                    read = self._versions.version(same, owner) or self._edits.visible(value)
                self._tell_apart(read, gradient, owner)
            return gradient
        if tensor is not None:
            return self._read_foreign(value, tensor, owner)
        if self._edits.owner(value.node.op) is owner:
            return self._edits.visible(value)
        made = value.node.op.outputs[value.slot]
        if value.node.is_argument and any(made is each for each in owner.forward.outputs):
            return self._edits.visible(value)  # A fed value takes precedence over the op's output.
        version = self._versions.version(made, owner)
        return version if version is not None else self._edits.visible(value)

    def _tell_apart(self, version: Value, gradient: Value, owner: Record) -> None:
        """Mark a gradient of an op as ambiguous if it is also a tensor that the op reads or makes.

        This happens if a differentiation begins with that tensor (`output_gradients`), or if a
        custom gradient returns it.
        """
        if self._edits.plain(version) == self._edits.plain(gradient):
            return
        if not is_derivable(owner.forward):
            raise UnsupportedError(
                f"One tensor is both a gradient that arrives at {owner.forward.name!r} and a value "
                "that the op reads or makes. It was edited, and it is not known which of both the "
                "op's gradient needs",
                fix="Pass a tf.identity of it as output_gradients",
            )
        self._versions.ambiguous.add(id(owner))

    def _read_foreign(self, value: Value, tensor: Any, owner: Record) -> Value:
        if tensor.dtype == tf.resource:
            return self._edits.visible(value)  # Tensor lists, which loops need, cannot hold them.
        seen = self._edits.around.forward_program.seen(owner.forward)
        wanted = self._versions.of(tensor, owner, seen) if seen is not None else None
        if wanted is None or self._edits.around.forward_program.carries(tensor, wanted):
            return self._edits.visible(value)
        self._edits.changed = True
        return self._edits.around.forward_program.bring(wanted)
