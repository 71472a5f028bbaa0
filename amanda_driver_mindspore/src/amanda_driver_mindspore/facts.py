"""Facts about MindSpore's tensors: shapes, values, memory.

Owns the answers to the questions of tools, which never inspect a value themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, dtype as mstype, ops

from amanda_core.driver_kit import contraction_of_equation, contraction_of_matmul
from amanda_core.interface import Arithmetic, Contraction, Facts, NotReadableError, Storage

__all__ = ["FACTS"]


class _TensorArithmetic(Arithmetic):
    counts = True

    def astype(self, x: Any, dtype: str) -> Any:
        if not hasattr(mstype, dtype):
            raise NotReadableError(f"no {dtype} in this framework")
        return x.astype(getattr(mstype, dtype))

    def clip(self, x: Any, low: float | None = None, high: float | None = None) -> Any:
        return ops.where(ops.isnan(x), x, ops.clamp(x, low, high))

    def reshape(self, x: Any, shape: Sequence[int]) -> Any:
        return ops.reshape(x, tuple(int(length) for length in shape))

    def sum(self, x: Any, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Any:
        return ops.sum(x, _axes(axis), keepdims)

    def largest(self, x: Any, axis: Sequence[int] | None) -> Any:
        finite = ops.where(ops.isfinite(x), ops.abs(x), ops.zeros_like(x))
        for one in range(x.ndim) if axis is None else axis:
            finite = ops.amax(finite, int(one), keepdims=True)
        return ops.stop_gradient(finite)

    def permute_dims(self, x: Any, axes: Sequence[int]) -> Any:
        return ops.transpose(x, _axes(axes))

    def pad(self, x: Any, after: Sequence[int]) -> Any:
        for axis, length in enumerate(after):
            if length:
                shape = (*x.shape[:axis], int(length), *x.shape[axis + 1 :])
                x = ops.concat((x, ops.zeros(shape, x.dtype)), axis)
        return x

    def any(self, x: Any, axis: Sequence[int]) -> Any:
        return ops.any(x, _axes(axis))

    def count_nonzero(self, x: Any, axis: Sequence[int] | None = None) -> Any:
        return ops.sum((x != 0).astype(mstype.int64), _axes(axis))


def _axes(axis: int | Sequence[int] | None) -> int | tuple[int, ...] | None:
    """Return axes as MindSpore takes them, which refuses numbers of other types."""
    return axis if axis is None or isinstance(axis, int) else tuple(int(one) for one in axis)


class _TensorFacts(Facts):
    channels_first = True
    arithmetic = _TensorArithmetic(ops)

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, Tensor)

    def constant(self, value: Any) -> str | None:
        return str(value) if isinstance(value, mstype.Type) else None

    def dtype(self, tensor: Any) -> str:
        return str(tensor.dtype).lower()

    def shape(self, tensor: Any) -> tuple[int | None, ...] | None:
        return tuple(tensor.shape)

    def device(self, tensor: Any) -> str:
        return str(tensor.device).lower()

    def contraction(self, context: Any) -> Contraction | None:
        inputs = context.get_inputs() or ()
        if context["type"] == "einsum" and inputs and isinstance(inputs[0], str):
            listed = len(inputs) == 2 and isinstance(inputs[1], (tuple, list))
            operands = list(inputs[1]) if listed else list(inputs[1:])
            places = [(1, n) if listed else n + 1 for n in range(len(operands))]
            return contraction_of_equation(inputs[0], places, [one.ndim for one in operands])
        if context["type"] != "matmul" or not all(map(self.is_tensor, inputs[:2])):
            return None
        turned = [False, False]
        if context.op_type in ("MatMul", "BatchMatMul"):
            turned = [bool(value) for value in inputs[2:4]] or turned
        shapes = [tuple(one.shape) for one in inputs[:2]]
        return contraction_of_matmul((0, 1), shapes, (turned[0], turned[1]))

    def nbytes(self, tensor: Any) -> int | None:
        return int(tensor.nbytes)

    def storage(self, tensor: Any) -> Storage | None:
        if not tensor.nbytes:
            return None
        memory = tensor.untyped_storage()
        return Storage(memory.data_ptr(), int(memory.nbytes()), tensor)

    def values(self, tensor: Any) -> Any:
        found = tensor.asnumpy()
        if found.dtype.kind == "V" or str(found.dtype) == "bfloat16":
            found = found.view(f"u{found.dtype.itemsize}")
        return np.array(found)

    def tensor(self, values: Any, like: Any) -> Any:
        return Tensor(np.ascontiguousarray(values))

    def cast(self, values: Any, like: Any) -> Any:
        return self.tensor(values, like).astype(like.dtype)

    def restore(self, values: Any, like: Any) -> Any:
        if self.dtype(like) != "bfloat16":
            return self.cast(values, like)
        # The bits of the numbers, of which a 32-bit number has the same and 16 more.
        wide = np.asarray(values).astype(np.uint32) << 16
        return Tensor(wide.view(np.float32)).astype(like.dtype)

    def update(self, parameter: Any, edit: Callable[[Any], Any]) -> None:
        parameter.set_data(edit(Tensor(parameter.asnumpy())).astype(parameter.dtype))

    def is_parameter(self, tensor: Any) -> bool:
        return isinstance(tensor, Parameter)

    def wants_gradient(self, tensor: Any) -> bool:
        return isinstance(tensor, Parameter) and bool(tensor.requires_grad)


#: Shared by all sessions, as it has no state.
FACTS: Facts = _TensorFacts()
