"""How a value of a forward program gets to where its gradient is computed.

Owns the paths between two bodies: a call of a function and the call of its gradient, a loop and
the loop that runs it backwards, a branch and its gradient's branch. TensorFlow has made such paths
for the values that gradients read; edited versions of these need paths of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorflow.core.framework import attr_value_pb2, tensor_pb2, types_pb2

from amanda_driver_tf._graph.body import Value
from amanda_driver_tf._graph.nodes import Argument, Plain
from amanda_driver_tf._graph.records import Records
from amanda_driver_tf._graph.versions import Foreign, Seen
from amanda_driver_tf._graph.write import attr_type
from amanda_driver_tf._tensorflow_internals.modules import ops
from amanda_driver_tf._tensorflow_internals.objects import indirect_captures

if TYPE_CHECKING:
    from amanda_driver_tf._graph.rewrite import Woven

__all__ = ["Link", "any_size", "dummy", "empty_list", "pushed"]

_VARIANT = types_pb2.DT_VARIANT


class Link(Foreign):
    """The forward program `forward` as the gradient `backward` sees it.

    Args:
        forward: The woven forward body.
        backward: The body of the gradient that is being woven.
        looped: Whether they are the bodies of loops, so that values come from lists.
    """

    def __init__(self, forward: Woven, backward: Woven, looped: bool) -> None:
        self._forward, self._backward, self.is_looped = forward, backward, looped
        self._sources = _captures(backward.body.graph, forward.body.graph)
        self._brought: dict[Value, Value] = {}

    def tensor(self, value: Value) -> Any:
        """The forward tensor that a value of the gradient's body carries."""
        return self._sources.get((id(value.node.op), value.slot))

    def seen(self, op: Any) -> Seen | None:
        """Return what an op of the forward body saw and made."""
        return self._forward.weaver.seen(op)

    def carries(self, tensor: Any, wanted: Value) -> bool:
        """Return True if TensorFlow's own path carries the wanted version."""
        return self._forward.weaver.reading.carries(tensor, wanted)

    def refuse_second(self, body: Any) -> None:
        """Refuse that `body` differentiates gradients of it that other ops compute by now."""
        self._forward.weaver.refuse_second(body)

    def bring(self, value: Value) -> Value:
        """A value of the forward body, by a path of its own."""
        known = self._brought.get(value)
        if known is not None:
            return known
        dtype = value.base
        argument = Argument("version", _VARIANT if self.is_looped else dtype)
        self._backward.arguments.append(argument)
        self._backward.demands.append(value)
        brought = Value(argument, 0)
        if self.is_looped:
            shape = any_size("version/shape")
            pop = Plain(
                "version/pop",
                "TensorListPopBack",
                [brought, Value(shape, 0)],
                [_VARIANT, dtype],
                {"element_dtype": attr_type(dtype)},
                ["output_handle:0", "tensor:0"],
            )
            for node in (shape, pop):
                self._backward.weaver.add(node)
            self._backward.results.append(Value(pop, 0))
            brought = Value(pop, 1)
        self._brought[value] = brought
        return brought


def _captures(backward: Any, forward: Any) -> dict[tuple[int, int], Any]:
    """Tensor of the gradient's graph -> the forward tensor that it stands for."""
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


def _constant(name: str, dtype: int, content: Any) -> Plain:
    value = attr_value_pb2.AttrValue()
    value.tensor.CopyFrom(content)
    return Plain(
        name, "Const", [], [dtype], {"dtype": attr_type(dtype), "value": value}, ["output:0"]
    )


def any_size(name: str) -> Plain:
    """A node that says of a list or stack, or of what is in it, that its size is not given."""
    content = tensor_pb2.TensorProto(dtype=types_pb2.DT_INT32)
    content.int_val.append(-1)
    return _constant(name, types_pb2.DT_INT32, content)


def empty_list(dtype: int) -> list[Plain]:
    """Nodes that make a list for values of a dtype; the last one's output is the list."""
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
    """A node that adds a value to a list."""
    dtype = value.base
    return Plain(
        "version/push",
        "TensorListPushBack",
        [accumulator, value],
        [_VARIANT],
        {"element_dtype": attr_type(dtype)},
        ["output_handle:0"],
    )


def dummy(dtype: int) -> list[Plain]:
    """Nodes that make some value of a dtype; the last one's output is it."""
    if dtype == _VARIANT:
        return empty_list(types_pb2.DT_FLOAT)
    content = tensor_pb2.TensorProto(dtype=dtype)
    return [_constant("version/none", dtype, content)]
