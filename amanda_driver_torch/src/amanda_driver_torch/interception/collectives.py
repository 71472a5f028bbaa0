"""Collectives of `torch.distributed`, which write tensors without counting it.

Owns the replacements of what all of them call in the end: the methods of process groups, and the
wait for one that was started.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from amanda_core.driver_kit import Patches, forget_all_edited

__all__ = ["replace"]

#: Methods of a process group that write tensors of this process.
_WRITING = (
    *("_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_to_all_single"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce"),
    *("allreduce_coalesced", "all_gather_single_coalesced", "alltoall", "alltoall_base"),
    *("broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "scatter"),
)


def replace(patches: Patches) -> None:
    """Watch the collectives until the patches are undone."""
    if not torch.distributed.is_available():
        return
    from torch.distributed import ProcessGroup, Work

    for owner, names in ((ProcessGroup, _WRITING), (Work, ("wait", "synchronize"))):
        for name in names:
            if name in vars(owner):
                patches.replace(owner, name, _forgetting(getattr(owner, name)))


def _forgetting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            # Tensors do not tell of these writes.
            forget_all_edited()

    return call
