"""The part of a base's gradient that belongs to a view which an in-place op wrote.

Autograd gives the base one node (CopySlices), whose gradients are those of the whole base. Owns the
geometry of the view's region in them.
"""

from __future__ import annotations

from typing import Any

import torch

from amanda_driver_torch._torch.tensor_attributes import base_of

__all__ = ["ViewRegion"]


class ViewRegion:
    """The region of a view in its base; references neither of them.

    Args:
        view: A view, with a base.
    """

    __slots__ = ("_base_size", "_base_stride", "_offset", "_size", "_stride")

    def __init__(self, view: torch.Tensor) -> None:
        base = base_of(view)
        assert base is not None
        self._base_size, self._base_stride = base.size(), base.stride()
        self._size, self._stride = view.size(), view.stride()
        self._offset = view.storage_offset() - base.storage_offset()

    def read(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the view's part of a gradient of the base, as a separate tensor."""
        return self._part(self._copy(grad)).clone()

    def write(self, grad: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return a gradient of the base whose part for the view is `part`."""
        new = self._copy(grad)
        self._part(new).copy_(part)
        return new

    def _copy(self, grad: Any) -> torch.Tensor:
        # The gradient's strides may differ from the base's (it may be expanded).
        copy = grad.new_empty_strided(self._base_size, self._base_stride)
        return copy.copy_(grad)  # type: ignore[no-any-return]

    def _part(self, grad: torch.Tensor) -> torch.Tensor:
        return grad.as_strided(self._size, self._stride, self._offset)
