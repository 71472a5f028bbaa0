"""Nodes that build the tensor lists by which loops pass values to their gradients."""

from __future__ import annotations

from typing import Any

from tensorflow.core.framework import attr_value_pb2, tensor_pb2, types_pb2

from amanda_driver_tf.graphs.body import Value
from amanda_driver_tf.insertion.function_def_writing import attr_type
from amanda_driver_tf.insertion.nodes import Plain

__all__ = ["any_size", "dummy", "empty_list", "popped", "pushed"]

_VARIANT = types_pb2.DT_VARIANT


def _constant(name: str, dtype: int, content: Any) -> Plain:
    value = attr_value_pb2.AttrValue()
    value.tensor.CopyFrom(content)
    return Plain(
        name, "Const", [], [dtype], {"dtype": attr_type(dtype), "value": value}, ["output:0"]
    )


def any_size(name: str) -> Plain:
    """Return a node that means "unknown" as the size of a list, or as the shape of its elements."""
    content = tensor_pb2.TensorProto(dtype=types_pb2.DT_INT32)
    content.int_val.append(-1)
    return _constant(name, types_pb2.DT_INT32, content)


def empty_list(dtype: int) -> list[Plain]:
    """Return the nodes that make an empty list; the last one's output is the list."""
    shape, length = any_size("version/shape"), any_size("version/length")
    made = Plain(
        "version/list",
        "EmptyTensorList",
        [Value(shape, 0), Value(length, 0)],
        [_VARIANT],
        {"element_dtype": attr_type(dtype), "shape_type": attr_type(types_pb2.DT_INT32)},
        ["handle:0"],
    )
    return [shape, length, made]


def pushed(accumulator: Value, value: Value) -> Plain:
    """Return a node that appends a value to a list."""
    dtype = value.base
    return Plain(
        "version/push",
        "TensorListPushBack",
        [accumulator, value],
        [_VARIANT],
        {"element_dtype": attr_type(dtype)},
        ["output_handle:0"],
    )


def popped(accumulator: Value, dtype: int) -> list[Plain]:
    """Return the nodes that pop a list's last value; the last one's outputs are list and value."""
    shape = any_size("version/shape")
    pop = Plain(
        "version/pop",
        "TensorListPopBack",
        [accumulator, Value(shape, 0)],
        [_VARIANT, dtype],
        {"element_dtype": attr_type(dtype)},
        ["output_handle:0", "tensor:0"],
    )
    return [shape, pop]


def dummy(dtype: int) -> list[Plain]:
    """Return nodes that make an arbitrary value of a dtype; the last one's output is the value."""
    if dtype == _VARIANT:
        return empty_list(types_pb2.DT_FLOAT)
    content = tensor_pb2.TensorProto(dtype=dtype)
    return [_constant("version/none", dtype, content)]
