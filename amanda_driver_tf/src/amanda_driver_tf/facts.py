"""Facts about TensorFlow's tensors, and about values that TensorFlow accepts as tensors.

Owns the answers, for tensors with values and for symbolic ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from amanda_core.interface import (
    DENSE,
    SYMBOLIC,
    Arithmetic,
    Contraction,
    Facts,
    Group,
    NotReadableError,
    Storage,
    UnsupportedError,
)
from amanda_driver_tf.contractions import contraction
from amanda_driver_tf.identity.variables import REPLICAS
from amanda_driver_tf.tensorflow_internals.modules import ops
from amanda_driver_tf.tensorflow_internals.objects import dtype_of_handle, workers

__all__ = ["FACTS"]

#: dtypes whose elements are not numbers.
_NO_NUMBERS = frozenset({"resource", "string", "variant"})
#: dtypes that NumPy does not have -> integers of the same size.
_BITS = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
}


class _TensorFlowArithmetic(Arithmetic):
    counts = True

    def astype(self, x: Any, dtype: str) -> Any:
        try:
            return tf.cast(x, dtype)
        except TypeError as error:
            raise NotReadableError(f"no {dtype} in this framework") from error

    def clip(self, x: Any, low: float | None = None, high: float | None = None) -> Any:
        if low is not None and high is not None:
            return tf.clip_by_value(x, low, high)
        x = x if low is None else tf.maximum(x, tf.cast(low, x.dtype))
        return x if high is None else tf.minimum(x, tf.cast(high, x.dtype))

    def sum(self, x: Any, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Any:
        return tf.reduce_sum(x, axis=axis, keepdims=keepdims)

    def largest(self, x: Any, axis: Sequence[int] | None) -> Any:
        magnitudes = tf.abs(x)
        zeros = tf.zeros_like(magnitudes)
        finite = tf.where(tf.math.is_finite(magnitudes), magnitudes, zeros)
        # The maximum of nothing is the lowest number.
        return self.clip(tf.reduce_max(finite, axis=axis, keepdims=True), 0.0)

    def any(self, x: Any, axis: Sequence[int]) -> Any:
        return tf.reduce_any(x, axis)

    def count_nonzero(self, x: Any, axis: Sequence[int] | None = None) -> Any:
        return tf.math.count_nonzero(x, axis)


class _TensorFlowFacts(Facts):
    shares_memory = True
    follows_graphs = True
    arithmetic = _TensorFlowArithmetic(tf)

    def is_tensor(self, value: Any) -> bool:
        if type(value) is ops.EagerTensor:
            return True  # Reading its shape would make an object.
        # Arrays, variables, slices and Keras' variables are accepted as tensors, too.
        return hasattr(value, "dtype") and hasattr(value, "shape")

    def is_own(self, tensor: Any) -> bool:
        return not isinstance(tensor, (np.ndarray, np.generic))

    def constant(self, value: Any) -> str | None:
        return str(value) if type(value).__module__.partition(".")[0] == "tensorflow" else None

    def dtype(self, tensor: Any) -> str:
        dtype = tensor.dtype
        return str(getattr(dtype, "name", dtype))

    def shape(self, tensor: Any) -> tuple[int | None, ...] | None:
        try:
            return tuple(None if length is None else int(length) for length in tensor.shape)
        except (TypeError, ValueError):
            return None  # The rank is unknown.

    def device(self, tensor: Any) -> str:
        device = getattr(tensor, "device", None)
        if not isinstance(device, str) or not device:
            return "cpu"
        kind, _, number = device.rpartition("device:")[2].partition(":")
        return "cpu" if kind == "CPU" else f"{kind.lower()}:{number or 0}"

    def contraction(self, context: Any) -> Contraction | None:
        return contraction(context)

    def layout(self, tensor: Any) -> str:
        if isinstance(tensor, ops.EagerTensor):
            return DENSE
        if isinstance(tensor, tf.Tensor):
            return SYMBOLIC
        composite = isinstance(tensor, (tf.IndexedSlices, tf.SparseTensor, tf.RaggedTensor))
        return type(tensor).__name__ if composite else DENSE

    def symbol(self, tensor: Any) -> tuple[Any, Hashable] | None:
        if type(tensor) is ops.EagerTensor or not isinstance(tensor, tf.Tensor):
            return None
        return tensor.graph, tensor.name

    def nbytes(self, tensor: Any) -> int | None:
        shape = self.shape(tensor)
        if shape is None:
            return None
        dtype = tensor.dtype
        size = getattr(dtype, "size", None) or getattr(dtype, "itemsize", 0) or 0
        return math.prod(length or 0 for length in shape) * int(size)

    def storage(self, tensor: Any) -> Storage | None:
        # Several tensors may share a buffer. Its address is known only on the CPU and for common
        # dtypes; otherwise each tensor counts as a storage of its own.
        if not isinstance(tensor, ops.EagerTensor):
            return None
        size = self.nbytes(tensor)
        if not size:
            return None
        key: object = id(tensor)
        if tensor.device.rpartition("/")[2].startswith("device:CPU"):
            # Python's buffer protocol does not support all dtypes.
            with contextlib.suppress(ValueError):
                key = _address(tensor)
        return Storage(key, size, tensor)

    def values(self, tensor: Any) -> Any:
        return self.view(tensor).copy()

    def view(self, tensor: Any) -> Any:
        import numpy as np

        name = self.dtype(tensor)
        if name in _NO_NUMBERS:
            raise NotReadableError(f"dtype {name}")
        try:
            array = np.asarray(tensor, order="C")
        except Exception as error:  # TensorFlow raises various types for tensors without values.
            raise NotReadableError(f"no values: {type(error).__name__}") from error
        if name in _BITS:
            return array.view(_BITS[name])
        if array.dtype.kind not in "biufc":
            raise NotReadableError(f"dtype {name}")
        return array

    def cast(self, values: Any, like: Any) -> Any:
        return values.astype(tf.as_dtype(like.dtype).as_numpy_dtype)

    def restore(self, values: Any, like: Any) -> Any:
        dtype = tf.as_dtype(like.dtype)
        bits = dtype.name in _BITS
        return values.view(dtype.as_numpy_dtype) if bits else self.cast(values, like)

    def processes(self) -> int:
        """Return how many replicas of the program compute together, at least as far as known."""
        several = 2 if REPLICAS else 1
        return max(int(tf.distribute.get_strategy().num_replicas_in_sync), workers(), several)

    def group(self, model: Any) -> Group:
        """Return this process alone.

        Raises:
            UnsupportedError: A strategy divides batches over replicas or workers.
        """
        if self.processes() > 1:
            raise UnsupportedError(
                "What is decided from data would differ in each replica of tf.distribute",
                fix="Decide without a strategy, save what was decided and load that",
            )
        return Group()

    def update(self, parameter: Any, edit: Callable[[Any], Any]) -> None:
        dtype = dtype_of_handle(parameter)
        if dtype is None:
            raise NotReadableError("a variable of a graph is written by a session only")
        value = tf.raw_ops.ReadVariableOp(resource=parameter, dtype=dtype)
        new = tf.cast(edit(value), dtype)
        tf.raw_ops.AssignVariableOp(resource=parameter, value=new)


def _address(tensor: Any) -> int:
    import numpy as np

    found: int = np.asarray(memoryview(tensor)).ctypes.data
    return found


#: Shared by all sessions, as it has no state.
FACTS: Facts = _TensorFlowFacts()
