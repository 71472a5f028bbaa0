"""Facts about arrays, which share memory with ONNX Runtime's values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from amanda_core.interface import Arithmetic, Contraction, Facts, NotReadableError, Storage
from amanda_driver_onnxruntime.staging import Staged, quantized
from amanda_driver_onnxruntime.vocabulary import contraction

__all__ = ["FACTS"]

#: What NumPy calls the dtypes that it takes from `ml_dtypes`, and how it shows their bits.
_BITS = {1: numpy.uint8, 2: numpy.uint16}
#: Arrays, and what stands for one where a routine becomes nodes.
_TENSORS = numpy.ndarray, Staged


class _Arithmetic(Arithmetic):
    counts = True

    def call(self, name: str, *tensors: Any, **options: Any) -> Any:
        found = super().call(name, *tensors, **options)
        return found if isinstance(found, _TENSORS) else numpy.asarray(found)

    def quantized(
        self, x: Any, scale: Any, inverse: Any, zero: Any, limits: tuple[float, float]
    ) -> Any:
        if isinstance(x, Staged):
            return quantized(x, scale, zero, limits)
        # QuantizeLinear divides by the scale.
        numbers, number = self.round(x / scale), 0 if zero is None else zero
        return (self.clip(numbers + number, *limits) - number) * scale


class _ArrayFacts(Facts):
    # Analysis runs operator by operator, and an input is the very output of another one.
    channels_first = shares_memory = follows_graphs = True
    arithmetic = _Arithmetic(numpy)

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, _TENSORS)

    def dtype(self, tensor: Any) -> str:
        return "string" if tensor.dtype.kind in "OUST" else str(tensor.dtype.name)

    def shape(self, tensor: Any) -> tuple[int | None, ...] | None:
        return tuple(tensor.shape)

    def nbytes(self, tensor: Any) -> int | None:
        return int(tensor.nbytes)

    def storage(self, tensor: Any) -> Storage | None:
        if isinstance(tensor, Staged):
            return None
        base = self.base(tensor)
        return Storage(base.ctypes.data, base.nbytes, base) if base.nbytes else None

    def base(self, tensor: Any) -> Any:
        while isinstance(tensor.base, numpy.ndarray):
            tensor = tensor.base
        return tensor

    def contraction(self, context: Any) -> Contraction | None:
        return contraction(context)

    def values(self, tensor: Any) -> Any:
        return self.view(tensor).copy()

    def view(self, tensor: Any) -> Any:
        if isinstance(tensor, Staged):
            raise NotReadableError("it has values only when the model runs")
        if tensor.dtype.kind in "OUST":
            raise NotReadableError("it holds texts")
        if tensor.dtype.isbuiltin == 1:
            return tensor
        if "int" in tensor.dtype.name:
            return tensor.astype(numpy.int8 if tensor.dtype.name.startswith("int") else numpy.uint8)
        return tensor.view(_BITS[tensor.dtype.itemsize])

    def tensor(self, values: Any, like: Any) -> Any:
        return numpy.asarray(values)

    def restore(self, values: Any, like: Any) -> Any:
        if like.dtype.isbuiltin != 1 and values.dtype in _BITS.values():
            packed = "int" in like.dtype.name
            return values.astype(like.dtype) if packed else values.view(like.dtype)
        return values.astype(like.dtype)

    def update(self, parameter: Any, edit: Callable[[Any], Any]) -> None:
        raise NotReadableError("weights of a session of ONNX Runtime cannot be written")

    def cast(self, values: Any, like: Any) -> Any:
        return values.astype(like.dtype)


#: Shared by all sessions, as it has no state.
FACTS: Facts = _ArrayFacts()
