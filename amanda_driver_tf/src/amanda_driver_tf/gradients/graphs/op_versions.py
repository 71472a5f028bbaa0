"""`OpVersions`: which version of a tensor a forward op ran on.

Answers this for ops whose gradients are in one body. Where the op itself is in another body, the
answer comes from `forward_program`.
"""

from __future__ import annotations

from typing import Any

from amanda_core.interface import UnsupportedError
from amanda_driver_tf.graphs.analysis import is_container
from amanda_driver_tf.graphs.body import Value
from amanda_driver_tf.graphs.control_flow_contexts import is_differentiated_elsewhere
from amanda_driver_tf.graphs.records import Record
from amanda_driver_tf.insertion.body_edits import BodyEdits
from amanda_driver_tf.insertion.op_values import OpValues, key_of, source_of
from amanda_driver_tf.tensorflow_internals.names import GRADIENT_OP_TYPE

__all__ = ["OpVersions", "is_derivable"]


class OpVersions:
    """The versions that forward ops ran on, as seen from the body of their gradients.

    Args:
        edits: The edits of the body.

    Attributes:
        ambiguous: Gradients (by identity) whose ops read one tensor that has several versions.
    """

    def __init__(self, edits: BodyEdits) -> None:
        self._edits = edits
        self.ambiguous: set[int] = set()

    def version(self, tensor: Any, owner: Record) -> Value | None:
        """Return the version of a tensor of this body that the forward op ran on, or None."""
        forward = self._edits.body.node_of(owner.forward)
        if forward is not None:
            self._edits.visit(forward)
        seen = self._edits.seen(owner.forward)
        return self.of(tensor, owner, seen) if seen is not None else None

    def of(self, tensor: Any, owner: Record, seen: OpValues) -> Value | None:
        """Return the version of a tensor that a gradient's op ran on or produced, or None.

        Args:
            tensor: A tensor of the forward body.
            owner: The gradient.
            seen: The values of its op.
        """
        forward = owner.forward
        read_by = list(zip(forward.inputs, seen.inputs, strict=False))
        key, source = key_of(tensor), key_of(source_of(tensor))
        exact = [version for read, version in read_by if key_of(read) == key]
        # A loop's gradient gets one tensor for a value and for every Identity of it.
        versions = [version for read, version in read_by if key_of(source_of(read)) == source]
        differ = len({self._edits.plain(version) for version in versions}) > 1
        if differ and not is_differentiated_elsewhere(owner):  # In these, edits are refused anyway.
            # One tensor at several positions, edited differently: the gradient's ops do not tell
            # which of the versions they need.
            if not is_derivable(forward):
                if (
                    self._is_looped(forward)
                    or len({self._edits.plain(each) for each in exact}) != 1
                ):
                    raise UnsupportedError(
                        f"{forward.name!r} reads a value twice, or the value and an Identity of "
                        "it. They were edited differently, and it is not known which version its "
                        "gradient needs",
                        fix="Edit both alike, or edit the outputs of the op that makes the value",
                    )
                return exact[0]
            # The op is differentiated again, with a separate tensor for each position.
            self.ambiguous.add(id(owner))
        if versions:
            return (exact or versions)[0]
        for index, made in enumerate(forward.outputs[: len(seen.outputs)]):
            if key_of(made) == key_of(tensor):
                return seen.outputs[index]
        return None

    def _is_looped(self, forward: Any) -> bool:
        """Return True if an op's gradient reads its values across the iterations of a loop."""
        is_here = self._edits.body.node_of(forward) is not None
        return not is_here and self._edits.around.forward_program.is_looped


def is_derivable(op: Any) -> bool:
    """Return True if an op's gradient can be derived again, for this op alone.

    This is not possible for ops that call functions or have a custom gradient, since both hold
    tensors of the op's graph.
    """
    return not is_container(op.type) and GRADIENT_OP_TYPE not in op.node_def.attr
