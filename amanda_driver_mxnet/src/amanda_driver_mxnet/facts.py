"""Facts about MXNet's arrays: shapes, values, memory.

Owns the answers to the questions of tools, which never inspect a value themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mxnet
from mxnet.ndarray import NDArray

from amanda_core.interface import DENSE, Arithmetic, Contraction, Facts, NotReadableError, Storage
from amanda_driver_mxnet.contractions import contraction
from amanda_driver_mxnet.mxnet_internals.arrays import address_of, dtype_of, new_array

__all__ = ["FACTS"]

_SIZES = {"bool": 1, "bfloat16": 2}


class _ArrayArithmetic(Arithmetic):
    def call(self, name: str, *tensors: Any, **options: Any) -> Any:
        # Arrays of the old interface share their memory with those of NumPy's.
        old = isinstance(tensors[0], NDArray) and not isinstance(tensors[0], mxnet.np.ndarray)
        arrays = (x.as_np_ndarray() if isinstance(x, NDArray) else x for x in tensors)
        found = getattr(self.module, name)(*arrays, **options)
        return found.as_nd_ndarray() if old else found

    def round(self, x: Any) -> Any:
        # MXNet's functions round halves up or down, and not to even.
        above = self.call("floor", x + 0.5)
        return above - (above - x == 0.5) * (above / 2 != self.call("floor", above / 2))

    def largest(self, x: Any, axis: Sequence[int] | None) -> Any:
        finite = self.call("where", self.call("isfinite", x), abs(x), self.zeros_like(x))
        return self.call("max", finite, axis=axis, keepdims=True)


class _ArrayFacts(Facts):
    channels_first = True
    arithmetic = _ArrayArithmetic(mxnet.np)

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, NDArray)

    def dtype(self, tensor: Any) -> str:
        return dtype_of(tensor)

    def shape(self, tensor: Any) -> tuple[int | None, ...] | None:
        return tuple(tensor.shape)

    def device(self, tensor: Any) -> str:
        device = tensor.ctx
        return f"cuda:{device.device_id}" if device.device_type == "gpu" else "cpu"

    def contraction(self, context: Any) -> Contraction | None:
        return contraction(context)

    def layout(self, tensor: Any) -> str:
        return DENSE if tensor.stype == "default" else str(tensor.stype)

    def nbytes(self, tensor: Any) -> int | None:
        name = self.dtype(tensor)
        size = _SIZES.get(name) or int(name.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8
        return int(math.prod(tensor.shape)) * size

    def storage(self, tensor: Any) -> Storage | None:
        layout = self.layout(tensor)
        if layout != DENSE:
            raise NotReadableError(f"a {layout} array has no single memory")
        size = self.nbytes(tensor)
        address = address_of(tensor) if size else None
        # An array has no weak references, but its handle has.
        return Storage(address, size or 0, tensor.handle) if address else None

    def tensor(self, values: Any, like: Any) -> Any:
        return new_array(values, like)

    def values(self, tensor: Any) -> Any:
        return tensor.asnumpy().copy()

    def update(self, parameter: Any, edit: Callable[[Any], Any]) -> None:
        parameter[:] = edit(parameter.detach())


#: Shared by all sessions, as it has no state.
FACTS: Facts = _ArrayFacts()
