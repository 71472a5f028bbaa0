"""Conditions of loops, where TensorFlow's optimiser of loops can read them.

That of 2.21 looks for the node that a condition's comparison reads by the name of the tensor, finds
none for a second output (``node:1``), and crashes. Host nodes have as many outputs as they were
given inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from amanda_driver_tf._graphs.body import Node, Value
from amanda_driver_tf._insertion.definitions import attr_shape, attr_type
from amanda_driver_tf._insertion.nodes import Host, New, Plain

__all__ = ["operands"]

_COMPARISONS = frozenset({"Less", "LessEqual", "Greater", "GreaterEqual", "Equal", "NotEqual"})


def operands(node: Node, inputs: list[Value], add: Callable[[New], Sequence[Value]]) -> list[Value]:
    """Return what an op reads instead of some inputs, where it may be the condition of a loop.

    Args:
        node: The op.
        inputs: What it is to read.
        add: Puts a new node in.
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
