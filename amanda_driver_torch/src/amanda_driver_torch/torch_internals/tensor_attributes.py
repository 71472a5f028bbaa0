"""Reads attributes of a program's tensors without raising, rebuilding or dispatching.

Owns every attribute that may do more than return a field. PyTorch rebuilds the `grad_fn` of a view
whose base was written, or raises. Sparse tensors and wrapper subclasses have no memory to point to.
Subclasses may override any attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from amanda_core.driver_kit import Memory
from amanda_driver_torch.torch_internals.extension import native
from amanda_driver_torch.torch_internals.internals import (
    DETACHED_VIEWS,
    DisableTorchFunctionSubclass,
    TensorBase,
    base_descriptor,
    creation_of_view,
    read_base,
    storage_address,
)

#: Types of tensors whose attributes no subclass overrides.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_BASE = frozenset({torch.Tensor})

#: Context in which attributes of tensor subclasses are those of `torch.Tensor`.
without_overrides = DisableTorchFunctionSubclass

#: Keeps the freeing of deep graphs from overflowing the stack once Python has seen their nodes.
#: Without the extension, the limit is that of plain PyTorch with hooks on its nodes.
_protect: Callable[[Any], Any] = native.protect if native is not None else lambda node: node


def _reader(attribute: Any) -> Callable[[torch.Tensor], Any]:
    # By the descriptor, since a subclass may have a property of this name.
    read = attribute.__get__

    def read_attribute(tensor: torch.Tensor) -> Any:
        if type(tensor) in PLAIN:
            return read(tensor)
        with without_overrides():
            return read(tensor)

    return read_attribute


_is_leaf, _grad_fn = _reader(TensorBase.is_leaf), _reader(TensorBase.grad_fn)
_is_nested, _shape = _reader(TensorBase.is_nested), _reader(TensorBase.shape)

#: Whether a tensor requires a gradient. A view does if its base does.
requires_grad: Callable[[torch.Tensor], bool] = _reader(TensorBase.requires_grad)
#: The base of a view, or None.
base_of: Callable[[torch.Tensor], torch.Tensor | None] = _reader(base_descriptor)

#: The number of a tensor among the outputs of its node; read the node first.
output_number: Callable[[torch.Tensor], int] = _reader(TensorBase.output_nr)


def are_base_tensors(values: Iterable[Any]) -> bool:
    """Return True if all values are tensors, and none is of a subclass."""
    return _BASE.issuperset(map(type, values))


def is_weight(tensor: torch.Tensor) -> bool:
    """Return True if a tensor may be a weight: a leaf that itself requires a gradient.

    A view of a tensor that requires a gradient never is. Reading whether it is a leaf would rebuild
    its node, so that is not done.
    """
    if not requires_grad(tensor):
        return False
    base = base_of(tensor)
    return (base is None or not requires_grad(base)) and bool(_is_leaf(tensor))


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Return True if an operator would give a tensor a gradient, and its node may be read."""
    has_gradient = tensor.requires_grad if type(tensor) in PLAIN else requires_grad(tensor)
    return has_gradient and not _is_detached_view(tensor)


def node_of(tensor: torch.Tensor) -> Any:
    """Return the node that made a tensor; None for a leaf, or if PyTorch refuses to tell."""
    if _is_detached_view(tensor):
        return None
    try:
        return _protect(tensor.grad_fn if type(tensor) in PLAIN else _grad_fn(tensor))
    except RuntimeError:
        # A view made by `unbind` or a custom function, whose base was written. It has no node any
        # more, and every differentiable operator on it raises, too.
        return None


def _is_detached_view(tensor: torch.Tensor) -> bool:
    # Views that were made while no graph was recorded have no node, even if their base requires a
    # gradient; once the base is written, reading their node raises.
    base = read_base(tensor) if type(tensor) in PLAIN else base_of(tensor)
    return base is not None and requires_grad(base) and creation_of_view(tensor) in DETACHED_VIEWS


def memory_of(tensor: torch.Tensor) -> int | None:
    """Return a number that tensors share if they share memory; None if that is not known.

    It is the address of the storage object, since reading that of the data would trigger
    copy-on-write.
    """
    if type(tensor) not in PLAIN:
        return None  # A wrapper's storage is a dummy.
    try:
        return storage_address(tensor.untyped_storage())
    except RuntimeError:
        return None  # Sparse and opaque layouts.


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage in which a tensor's elements lie; None if it has none of its own."""
    if type(tensor) not in PLAIN:
        return None  # A wrapper's storage is a dummy.
    try:
        return tensor.untyped_storage()
    except RuntimeError:
        return None  # Sparse and opaque layouts.


def layout_of(tensor: torch.Tensor) -> Memory | None:
    """Return where the elements of a tensor are in memory; None if strides do not tell."""
    if not is_strided(tensor):
        return None
    address = memory_of(tensor)
    if address is None:
        return None
    try:
        return Memory(
            address,
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype.itemsize,
        )
    except RuntimeError:
        return None  # Values wrapped by functorch, and symbolic sizes.


def is_strided(tensor: torch.Tensor) -> bool:
    """Return True if size, strides and offset give the place of each element of a tensor."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def repeats_memory(tensor: torch.Tensor) -> bool:
    """Return True if elements of a tensor share memory because it was expanded."""
    layout = layout_of(tensor)
    if layout is None or 0 in layout.shape:
        return False
    return any(
        size > 1 and step == 0 for size, step in zip(layout.shape, layout.strides, strict=True)
    )


def is_nested_strided(tensor: torch.Tensor) -> bool:
    """Return True for a nested tensor that is not jagged, which no `autograd.Function` accepts."""
    return type(tensor) in PLAIN and tensor.is_nested


def shape_of(tensor: torch.Tensor) -> torch.Size:
    """Return the shape; empty for a nested tensor, which has none."""
    if type(tensor) in PLAIN:
        return torch.Size() if tensor.is_nested else tensor.shape
    return torch.Size() if _is_nested(tensor) else _shape(tensor)
