"""Passes values of a forward program to the place where its gradient is computed.

Owns the paths between two bodies: from a function call to the call of its gradient, from a loop to
the loop that runs it backwards, from a branch to the branch of its gradient. TensorFlow made such
paths for the values that gradients read. Edited versions need additional paths.
"""

from __future__ import annotations

from typing import Any

from tensorflow.core.framework import types_pb2

from amanda_driver_tf.graphs.body import Value
from amanda_driver_tf.graphs.records import Records
from amanda_driver_tf.insertion.nodes import Argument
from amanda_driver_tf.insertion.op_values import ForwardProgram, OpValues
from amanda_driver_tf.insertion.tensor_lists import popped
from amanda_driver_tf.rewriting.rewritten_function import RewrittenFunction
from amanda_driver_tf.tensorflow_internals.modules import ops
from amanda_driver_tf.tensorflow_internals.objects import indirect_captures

__all__ = ["Link"]

_VARIANT = types_pb2.DT_VARIANT


class Link(ForwardProgram):
    """Access to the forward program `forward` from the body of its gradient `backward`.

    Args:
        forward: The rewritten forward body.
        backward: The body of the gradient, which is being rewritten.
        looped: Whether both are bodies of loops, so that values come from tensor lists.
    """

    def __init__(
        self, forward: RewrittenFunction, backward: RewrittenFunction, looped: bool
    ) -> None:
        self._forward, self._backward, self.is_looped = forward, backward, looped
        self._sources = _captures(backward.body.graph, forward.body.graph)
        self._brought: dict[Value, Value] = {}

    def tensor(self, value: Value) -> Any:
        """Return the forward tensor that a value of the gradient's body carries."""
        return self._sources.get((id(value.node.op), value.slot))

    def seen(self, op: Any) -> OpValues | None:
        """Return the values that an op of the forward body ran on and produced."""
        return self._forward.edits.seen(op)

    def carries(self, tensor: Any, wanted: Value) -> bool:
        """Return True if TensorFlow's own path carries the version `wanted`."""
        return self._forward.edits.carries(tensor, wanted)

    def refuse_second(self, body: Any) -> None:
        """Refuse to differentiate gradients in `body` that new nodes compute."""
        self._forward.rewriter.refuse_second(body)

    def bring(self, value: Value) -> Value:
        """Pass a value of the forward body to the gradient's body; return it there."""
        known = self._brought.get(value)
        if known is not None:
            return known
        dtype = value.base
        argument = Argument("version", _VARIANT if self.is_looped else dtype)
        self._backward.arguments.append(argument)
        self._backward.demands.append(value)
        brought = Value(argument, 0)
        if self.is_looped:
            made = popped(brought, dtype)
            for node in made:
                self._backward.edits.add(node)
            self._backward.results.append(Value(made[-1], 0))
            brought = Value(made[-1], 1)
        self._brought[value] = brought
        return brought


def _captures(backward: Any, forward: Any) -> dict[tuple[int, int], Any]:
    """Map each tensor of the gradient's graph that stands for a forward tensor to that tensor."""
    noted = Records.of(backward)
    found = {
        inner: outer
        for inner, outer in (noted.captured if noted is not None else {}).items()
        if getattr(outer, "graph", None) is forward
    }
    indirect = indirect_captures(backward)
    if indirect:
        for op in forward.get_operations():
            for tensor in op.outputs:
                inner = indirect.get(ops.tensor_id(tensor))
                if inner is not None:
                    found[id(inner.op), inner.value_index] = tensor
    return found
