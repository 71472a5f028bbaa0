"""Facts about tensors that can be observed from outside, by which two runs are compared bit by bit.

Values and layout are facts about the result. Identity, aliasing and the graph's shape are facts
about how it was computed: a copy changes them, and a routine that returns None must not.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from . import device

#: Name of a fact -> the fact; comparable by `==`.
Facts = dict[str, Any]


def bits(tensor: torch.Tensor) -> Any:
    """Return the values of a tensor of any layout as bytes."""
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        # Not coalesced: the order of entries is a fact too.
        return bits(tensor._indices()), bits(tensor._values()), tensor.is_coalesced()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return bits(tensor.crow_indices()), bits(tensor.col_indices()), bits(tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return bits(tensor.ccol_indices()), bits(tensor.row_indices()), bits(tensor.values())
    if tensor.is_nested:
        return tuple(bits(part) for part in tensor.unbind())
    if tensor.is_mkldnn:
        return bits(tensor.to_dense())
    if tensor.is_quantized:
        return bits(tensor.int_repr()), str(tensor.qscheme())
    if tensor.device.type == "meta":
        return None
    # `contiguous` keeps odd strides of dimensions of one element.
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return dense.view(torch.uint8).numpy().tobytes()


def value(tensor: torch.Tensor) -> Any:
    """Return class, dtype, shape and bits of a tensor."""
    shape = "nested" if tensor.is_nested else tuple(tensor.shape)
    return type(tensor).__name__, str(tensor.dtype), shape, bits(tensor)


def storage(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's storage, or None if it has none or an empty one."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor._is_zerotensor():
        return None
    return tensor.untyped_storage().data_ptr() or None


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a result, in order."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def others(tree: Any) -> tuple[str, ...]:
    """Return what is not a tensor in a result: its structure and plain values."""
    leaves, structure = tree_flatten(tree)
    kinds = [f"{leaf!r}" for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    return (str(structure), *kinds)


def facts(
    name: str, tensor: torch.Tensor, known: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, Any]]:
    """Yield all facts that are compared of a tensor; it may share the storage of those in
    `known`.
    """
    yield f"{name}: value", value(tensor)
    if tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_mkldnn:
        yield f"{name}: strides", tensor.stride()
        yield f"{name}: offset", tensor.storage_offset()
    place = storage(tensor)
    known = list(known)
    yield f"{name}: requires grad", tensor.requires_grad
    yield f"{name}: is", [other for other, t in known if t is tensor]
    yield f"{name}: aliases", [other for other, t in known if place and storage(t) == place]
    if not tensor.is_inference():
        yield f"{name}: version", tensor._version
    yield f"{name}: view", tensor._is_view()
    yield f"{name}: leaf", tensor.is_leaf
    yield f"{name}: node", _node(tensor)
    yield f"{name}: conjugate, negative", (tensor.is_conj(), tensor.is_neg())


def _node(tensor: torch.Tensor) -> str | None:
    """Return the name of the node that produced a tensor, skipping Amanda's own nodes."""
    node, number = tensor.grad_fn, tensor.output_nr
    while node is not None and node.name().startswith("Amanda"):
        node, number = node.next_functions[number]
    return None if node is None else node.name()


#: Facts about results, which hold even if a value was replaced by a copy.
OF_RESULTS = ("value", "strides", "requires grad", "error", "others", "random state")


def kind(name: str) -> str:
    """Return the kind of a fact: the last part of its name."""
    return name.rsplit(": ", 1)[-1]


def random_states() -> tuple[int, int]:
    """Return checksums of the states of torch's and Python's random generators."""
    state = b"".join(g.get_state().numpy().tobytes() for g in device.generators())
    # Not `hash`, which differs between processes.
    return zlib.crc32(state), zlib.crc32(repr(random.getstate()).encode())


def different(plain: Facts, other: Facts, *, results_only: bool) -> list[str]:
    """Return the names of the facts that differ."""
    names = list(plain) + [name for name in other if name not in plain]
    missing = object()
    return [
        name
        for name in names
        if (not results_only or kind(name) in OF_RESULTS)
        and plain.get(name, missing) != other.get(name, missing)
    ]
