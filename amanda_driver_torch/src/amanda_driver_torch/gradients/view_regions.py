"""The part of a base's gradient that belongs to a view which an in-place op wrote.

Autograd gives the base one node (CopySlices), whose gradients are those of the whole base. Owns the
geometry of the view's region in them.
"""

from __future__ import annotations

from typing import Any

import torch

from amanda_driver_torch.torch_internals.internals import negated
from amanda_driver_torch.torch_internals.tensor_attributes import base_of

__all__ = ["ViewRegion"]


class ViewRegion:
    """The region of a view in its base; references neither of them.

    Args:
        view: A view, with a base.
    """

    __slots__ = ("_base_size", "_base_stride", "_conjugate", "_dtype", "_negative", "_place")

    def __init__(self, view: torch.Tensor) -> None:
        base = base_of(view)
        assert base is not None
        self._base_size, self._base_stride = base.size(), base.stride()
        # The real numbers of complex ones have another size, and so another unit of the offset.
        before = base.storage_offset() * base.element_size() // view.element_size()
        self._place = view.storage_offset() - before, view.size(), view.stride()
        self._dtype = view.dtype if view.dtype != base.dtype else None
        self._conjugate = view.is_conj() != base.is_conj()
        self._negative = view.is_neg() != base.is_neg()

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
        offset, size, stride = self._place
        if self._dtype is None:
            part = grad.as_strided(size, stride, offset)
        else:
            part = grad.new_empty(0, dtype=self._dtype)
            part.set_(grad.untyped_storage(), offset, size, stride)
        if self._conjugate:
            part = part.conj()
        return negated(part) if self._negative else part
