"""Facts about MXNet's arrays: shapes, values, memory.

Owns the answers to the questions of tools, which never inspect a value themselves.
"""

from __future__ import annotations

import math
from typing import Any

from amanda_core.facts import DENSE, Facts, NotReadableError, Storage
from amanda_driver_mxnet._mxnet_internals import NDArray, address_of, dtype_of

__all__ = ["FACTS"]

_SIZES = {"bool": 1, "bfloat16": 2}


class _ArrayFacts(Facts):
    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, NDArray)

    def dtype(self, tensor: NDArray) -> str:
        return dtype_of(tensor)

    def shape(self, tensor: NDArray) -> tuple[int | None, ...] | None:
        return tuple(tensor.shape)

    def device(self, tensor: NDArray) -> str:
        device = tensor.ctx
        if device.device_type == "gpu":
            return f"cuda:{device.device_id}"
        return "cpu"

    def layout(self, tensor: NDArray) -> str:
        return DENSE if tensor.stype == "default" else str(tensor.stype)

    def nbytes(self, tensor: NDArray) -> int | None:
        name = self.dtype(tensor)
        size = _SIZES.get(name) or int(name.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8
        return int(math.prod(tensor.shape)) * size

    def storage(self, tensor: NDArray) -> Storage | None:
        size = self.nbytes(tensor)
        if tensor.stype != "default":
            raise NotReadableError("a sparse array has several memories")
        address = address_of(tensor) if size else None
        # An array has no weak references, but its handle has.
        return Storage(address, size or 0, tensor.handle) if address else None

    def values(self, tensor: NDArray) -> Any:
        return tensor.asnumpy().copy()


#: Shared by all sessions, as it has no state.
FACTS: Facts = _ArrayFacts()
