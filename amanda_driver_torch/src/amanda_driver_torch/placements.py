"""Tensors that are distributed over processes (`torch.distributed.tensor.DTensor`).

Owns the part of them that this process holds. Reading that part communicates with nobody, where
almost every operator on the tensor itself may: a clone of a partial sum adds it up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from amanda_core.interface import NotReadableError, Placement

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["distributed", "is_simulated", "largest", "like", "local", "placement_of"]


@cache
def distributed(kind: type) -> bool:
    """Return True for the class of distributed tensors, without importing it."""
    return any(
        one.__name__ == "DTensor" and one.__module__.startswith("torch.distributed")
        for one in kind.__mro__
    )


def local(tensor: Any) -> torch.Tensor:
    """Return the part of a distributed tensor that this process holds."""
    with torch.no_grad():  # Otherwise this would be an operator.
        part: torch.Tensor = tensor.to_local()
    return part


def is_simulated(tensor: Any) -> bool:
    """Return True for the values of all ranks that `LocalTensorMode` simulates in one process."""
    return type(tensor).__name__ == "LocalTensor"


def placement_of(tensor: DTensor) -> Placement:
    """Return which part of a distributed tensor this process holds."""
    mesh, parts = tensor.device_mesh, [(0, int(length)) for length in tensor.shape]
    place, partial, is_block = mesh.get_coordinate(), [], not is_simulated(local(tensor))
    pieces = Counter[int]()
    # A strided shard splits what the dimensions of the mesh after it have split before.
    strided = [hasattr(one, "split_factor") for one in tensor.placements]
    for number in sorted(range(len(strided)), key=strided.__getitem__):
        placement = tensor.placements[number]
        axis = getattr(placement, "dim", 0)
        if placement.is_partial():
            partial.append(str(getattr(placement, "reduce_op", "sum")))
        elif (
            is_block
            and place is not None
            and (
                type(placement).__name__ == "Shard"
                or getattr(placement, "split_factor", 0) == pieces[axis] > 0
            )
        ):
            pieces[axis] = (pieces[axis] or 1) * mesh.size(number)
            start, stop = parts[axis]
            each = -(-(stop - start) // mesh.size(number))
            first = min(start + each * place[number], stop)
            parts[axis] = first, min(first + each, stop)
        elif not placement.is_replicate():
            is_block = False
    return Placement(
        tuple(int(length) for length in tensor.shape),
        tuple(slice(*ends) for ends in parts) if is_block and place is not None else None,
        "+".join(partial),
        tuple(int(rank) for rank in mesh.mesh.flatten().tolist()),
    )


def largest(tensor: DTensor, part: torch.Tensor, axes: Sequence[int]) -> DTensor:
    """Return the largest elements of a tensor along some axes, in all processes that need them.

    It communicates over the dimensions of the mesh along which one of these axes is divided.

    Args:
        tensor: The tensor.
        part: The largest elements of this process's part, in which these axes have length 1.
        axes: The axes, counted from 0.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    shape = torch.Size(1 if axis in axes else n for axis, n in enumerate(tensor.shape))
    placements = [
        Partial("max") if getattr(one, "dim", None) in axes else one for one in tensor.placements
    ]
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(
        part, tensor.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return whole.redistribute(
        placements=[Replicate() if one.is_partial() else one for one in placements]
    )


def like(part: torch.Tensor, tensor: DTensor) -> torch.Tensor:
    """Return values of this process as a distributed tensor with the placement of another one.

    Args:
        part: As large as this process's part of `tensor`, or as the whole, of which this process
            then takes its part. Values of another shape are the same on all processes.
        tensor: The other one.

    Raises:
        NotReadableError: The part of the whole is not one block.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    mesh, placements, shape = tensor.device_mesh, tensor.placements, tensor.shape
    if is_simulated(local(tensor)) and part.shape == shape:
        # Each rank takes its part, of which there is one in this process for each.
        return distribute_tensor(part, mesh, placements, src_data_rank=None)
    if part.shape != local(tensor).shape:
        if part.shape != shape:
            return DTensor.from_local(part, mesh, [Replicate()] * mesh.ndim, run_check=False)
        own = placement_of(tensor).parts
        if own is None:
            raise NotReadableError("it is split over processes, and not into blocks")
        part = part[own]
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=shape, stride=tensor.stride()
    )
