"""Facts about MXNet's arrays: shapes, values, memory.

Owns the answers to the questions of tools, which never inspect a value themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mxnet.ndarray import NDArray

from amanda_core.facts import DENSE, Facts, NotReadableError, Storage
from amanda_driver_mxnet._mxnet_internals.arrays import address_of, dtype_of, new_array

__all__ = ["FACTS"]

_SIZES = {"bool": 1, "bfloat16": 2}


class _ArrayFacts(Facts):
    channels_first = True

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, NDArray)

    def dtype(self, tensor: Any) -> str:
        return dtype_of(tensor)

    def shape(self, tensor: Any) -> tuple[int | None, ...] | None:
        return tuple(tensor.shape)

    def device(self, tensor: Any) -> str:
        device = tensor.ctx
        return f"cuda:{device.device_id}" if device.device_type == "gpu" else "cpu"

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
