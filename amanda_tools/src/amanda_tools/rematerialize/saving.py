"""What autograd saves while an operator runs: handles in place of tensors.

Owns the handles, and how writes into the inputs of a call are noticed. What a handle stands for is
up to the store.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from amanda_tools.rematerialize.executions import Extent, Value

__all__ = ["Handle", "Writes", "packing"]


class _Store(Protocol):
    def read(self, value: Value) -> torch.Tensor: ...
    def drop(self, value: Value) -> None: ...


class Handle:
    """The object that autograd saves instead of a tensor.

    Attributes:
        value: The value in which the tensor lies; None if the tensor itself is kept.
        extent: Which part of the value it is.
        tensor: Without a value, an alias of the tensor.
        version: The version of that tensor when it was saved.
    """

    __slots__ = ("extent", "store", "tensor", "value", "version")

    def __init__(self, store: _Store) -> None:
        self.store = store
        self.value: Value | None = None
        self.extent: Extent | None = None
        self.tensor: torch.Tensor | None = None
        self.version = 0

    def unpack(self) -> torch.Tensor:
        """Return the tensor, for the operator's backward."""
        if self.value is None:
            assert self.tensor is not None
            if self.tensor._version != self.version:
                raise written_error(self.tensor, self.version)
            return self.tensor
        assert self.extent is not None
        if self.value.is_written:
            assert self.value.alias is not None
            raise written_error(self.value.alias, self.value.version)
        return self.extent.within(self.store.read(self.value))

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.value is not None and not ends():
            self.store.drop(self.value)


def packing(
    store: _Store,
) -> tuple[list[tuple[Handle, torch.Tensor]], Callable[[torch.Tensor], Handle]]:
    """Return a list, and a hook that adds to it what autograd saves and makes handles of it.

    Clear the list at the end of the call: autograd keeps the hook as long as what it returned.
    """
    handles: list[tuple[Handle, torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> Handle:
        handle = Handle(store)
        handles.append((handle, tensor))
        return handle

    return handles, pack


class Writes:
    """Notices which inputs an operator writes.

    Args:
        tensors: The inputs.
        uncounted: Whether it may write vectors without counting that, as it writes statistics.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], uncounted: bool) -> None:
        self._tensors = tensors
        self._versions = [tensor._version for tensor in tensors]
        vectors = [tensor.dim() == 1 and uncounted for tensor in tensors]
        self._before = [
            t.clone() if is_one else t for t, is_one in zip(tensors, vectors, strict=True)
        ]

    def found(self) -> set[int]:
        """Return the numbers of the inputs that were written."""
        kept = zip(self._tensors, self._versions, self._before, strict=True)
        return {
            number
            for number, (tensor, version, before) in enumerate(kept)
            if tensor._version != version or not _equal(tensor, before)
        }


def _equal(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    return tensor is before or torch.equal(tensor, before)


def written_error(tensor: torch.Tensor, version: int) -> RuntimeError:
    """Return the error that autograd raises for a saved tensor that was written."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
        f"expected version {version} instead."
    )
