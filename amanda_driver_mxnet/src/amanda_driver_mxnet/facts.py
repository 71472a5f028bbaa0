"""Facts about MXNet's arrays: shapes, values, memory.

Owns the answers to the questions of tools, which never inspect a value themselves, and the
placeholder of an array in the graph of a hybridized block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mxnet.ndarray import NDArray

from amanda_core.facts import DENSE, SYMBOLIC, Facts, NotReadableError, Storage
from amanda_core.weak import Known
from amanda_driver_mxnet._mxnet_internals.arrays import address_of, dtype_of, new_array

__all__ = ["FACTS", "IN_GRAPHS", "SymbolicArray"]

#: Handles of arrays that were passed to routines by a hybridized block.
IN_GRAPHS: Known[bool] = Known()
_SIZES = {"bool": 1, "bfloat16": 2}


@dataclass(frozen=True, eq=False)  # Not a tuple, which would be a list of arrays.
class SymbolicArray:
    """An array of a graph: a parameter, an input of the block, or the result of an operator.

    Attributes:
        shape: Its dimensions when the graph was rewritten; None if unknown.
        dtype: The name of its dtype.
        array: The array of a parameter; None for others.
        wanted: Whether its gradient is wanted.
    """

    shape: tuple[int, ...] | None
    dtype: str
    array: Any
    wanted: bool


class _ArrayFacts(Facts):
    channels_first = True

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, (NDArray, SymbolicArray))

    def dtype(self, tensor: Any) -> str:
        return tensor.dtype if isinstance(tensor, SymbolicArray) else dtype_of(tensor)

    def shape(self, tensor: Any) -> tuple[int | None, ...] | None:
        return None if tensor.shape is None else tuple(length or None for length in tensor.shape)

    def device(self, tensor: Any) -> str:
        device = None if isinstance(tensor, SymbolicArray) else tensor.ctx
        return f"cuda:{device.device_id}" if device and device.device_type == "gpu" else "cpu"

    def layout(self, tensor: Any) -> str:
        if isinstance(tensor, SymbolicArray):
            return SYMBOLIC
        return DENSE if tensor.stype == "default" else str(tensor.stype)

    def nbytes(self, tensor: Any) -> int | None:
        name = self.dtype(tensor)
        size = _SIZES.get(name) or int(name.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8
        return None if tensor.shape is None else int(math.prod(tensor.shape)) * size

    def storage(self, tensor: Any) -> Storage | None:
        layout = self.layout(tensor)
        if layout != DENSE:
            raise NotReadableError(f"a {layout} array has no single memory")
        if IN_GRAPHS.get(tensor.handle):
            raise NotReadableError("MXNet plans the memory of a hybridized block as a whole")
        size = self.nbytes(tensor)
        address = address_of(tensor) if size else None
        # An array has no weak references, but its handle has.
        return Storage(address, size or 0, tensor.handle) if address else None

    def tensor(self, values: Any, like: Any) -> Any:
        return new_array(values, like)

    def values(self, tensor: Any) -> Any:
        if isinstance(tensor, SymbolicArray):
            raise NotReadableError("an array of a graph has values only when it runs")
        return tensor.asnumpy().copy()

    def update(self, parameter: Any, edit: Callable[[Any], Any]) -> None:
        parameter[:] = edit(parameter.detach())


#: Shared by all sessions, as it has no state.
FACTS: Facts = _ArrayFacts()
