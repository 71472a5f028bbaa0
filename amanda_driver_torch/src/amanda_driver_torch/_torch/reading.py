"""What the driver reads of a program's tensors, in ways that cannot raise, rebuild or dispatch.

Owns every attribute that may do more than return a field: PyTorch rebuilds the `grad_fn` of a view
whose base was written, or raises; sparse tensors and wrapper subclasses have no memory to point to;
subclasses may override any attribute. It decides nothing about what is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from amanda_driver_torch._torch.extension import native
from amanda_driver_torch._torch.internals import (
    DETACHED_VIEWS,
    DisableTorchFunctionSubclass,
    TensorBase,
    base_descriptor,
    creation_of_view,
    storage_address,
)

__all__ = [
    "PLAIN",
    "base_of",
    "dtype_of",
    "is_differentiable",
    "is_nested_strided",
    "is_strided",
    "is_weight",
    "memory_of",
    "node_of",
    "output_number",
    "requires_grad",
    "shape_of",
    "without_overrides",
]

#: Types of tensors that no subclass gives a meaning of its own.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

#: Extent in which attributes of tensor subclasses are those of `torch.Tensor`.
without_overrides = DisableTorchFunctionSubclass

#: What keeps the freeing of deep graphs from overflowing the stack, once Python has seen their
#: nodes. Without the extension they are as deep as plain PyTorch stands with hooks on its nodes.
_protect: Callable[[Any], Any] = native.protect if native is not None else lambda node: node


def _reader(attribute: Any) -> Callable[[torch.Tensor], Any]:
    # By the descriptor: a subclass may have a property of its own by this name.
    read = attribute.__get__

    def read_attribute(tensor: torch.Tensor) -> Any:
        if type(tensor) in PLAIN:
            return read(tensor)
        with without_overrides():
            return read(tensor)

    return read_attribute


_is_leaf, _grad_fn = _reader(TensorBase.is_leaf), _reader(TensorBase.grad_fn)
_layout, _is_nested = _reader(TensorBase.layout), _reader(TensorBase.is_nested)
_shape = _reader(TensorBase.shape)

#: Whether a tensor requires a gradient. A view does if its base does.
requires_grad: Callable[[torch.Tensor], bool] = _reader(TensorBase.requires_grad)
#: What a tensor is a view of, or None.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = _reader(base_descriptor)

dtype_of: Callable[[torch.Tensor], torch.dtype] = _reader(TensorBase.dtype)
#: Which output of its node a tensor is; read the node first.
output_number: Callable[[torch.Tensor], int] = _reader(TensorBase.output_nr)


def is_weight(tensor: torch.Tensor) -> bool:
    """Return True if a tensor can be somebody's weight: a leaf that requires a gradient itself.

    A view of what requires a gradient never is: whether it is a leaf is not asked, since that
    rebuilds its node.
    """
    if not requires_grad(tensor):
        return False
    base = base_of(tensor)
    return (base is None or not requires_grad(base)) and bool(_is_leaf(tensor))


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Return True if an operator would give a tensor a gradient, and its node may be read."""
    return requires_grad(tensor) and not _is_detached_view(tensor)


def node_of(tensor: torch.Tensor) -> Any:
    """Return the node that made a tensor; None for a leaf, and where PyTorch refuses to say."""
    if _is_detached_view(tensor):
        return None
    try:
        return _protect(_grad_fn(tensor))
    except RuntimeError:
        # A view by `unbind` or a custom function, whose base was written: it has no node any more,
        # and every differentiable operator on it raises as well.
        return None


def _is_detached_view(tensor: torch.Tensor) -> bool:
    # Views that were made while no graph was recorded have no node, even if their base requires a
    # gradient; once the base is written, reading their node raises.
    base = base_of(tensor)
    return base is not None and requires_grad(base) and creation_of_view(tensor) in DETACHED_VIEWS


def memory_of(tensor: torch.Tensor) -> int | None:
    """Return a number that tensors share if they share memory; None where that cannot be told.

    It is the address of the storage object. That of the data would copy what is copied on write.
    """
    if type(tensor) not in PLAIN:
        return None  # A wrapper's storage is a dummy.
    try:
        return storage_address(tensor.untyped_storage())
    except RuntimeError:
        return None  # Sparse and opaque layouts.


def is_strided(tensor: torch.Tensor) -> bool:
    """Return True if size, strides and offset say where each element of a tensor lies."""
    return type(tensor) in PLAIN and _layout(tensor) is torch.strided and not _is_nested(tensor)


def is_nested_strided(tensor: torch.Tensor) -> bool:
    """Return True for a nested tensor that is not jagged: no `autograd.Function` takes one."""
    return bool(_is_nested(tensor)) and type(tensor) in PLAIN


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """Return the shape; empty for a nested tensor, which has none."""
    return torch.Size() if _is_nested(tensor) else _shape(tensor)
