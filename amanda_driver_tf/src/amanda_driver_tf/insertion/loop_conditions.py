"""Works around a crash of TensorFlow's loop optimizer in loop conditions.

The optimizer looks up the node that a condition's comparison reads by the name of the
tensor. For an output other than the first (``node:1``) it finds no node and crashes. Host nodes
have as many outputs as inputs, so a comparison may read such an output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from amanda_driver_tf.graphs.body import Node, Value
from amanda_driver_tf.insertion.function_def_writing import attr_shape, attr_type
from amanda_driver_tf.insertion.nodes import Host, New, Plain

__all__ = ["operands"]

_COMPARISONS = frozenset({"Less", "LessEqual", "Greater", "GreaterEqual", "Equal", "NotEqual"})


def operands(node: Node, inputs: list[Value], add: Callable[[New], Sequence[Value]]) -> list[Value]:
    """Return the inputs that an op can read safely if it may be the condition of a loop.

    Args:
        node: The op.
        inputs: The inputs it should read.
        add: Inserts a new node.
    """
    is_scalar = all(tensor.shape.rank == 0 for tensor in node.op.inputs)
    if node.op_type not in _COMPARISONS or not is_scalar:
        return inputs
    read = []
    for value in inputs:
        if isinstance(value.node, Host) and value.slot:
            name, dtype = f"{node.name}/operand", value.dtype
            attrs = {"T": attr_type(dtype), "shape": attr_shape(())}
            (value,) = add(Plain(name, "EnsureShape", [value], [dtype], attrs, ["output:0"]))
        read.append(value)
    return read
