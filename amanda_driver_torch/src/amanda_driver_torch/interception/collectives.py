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
from amanda_driver_torch.torch_internals.distributed import COMMUNICATORS

__all__ = ["forgetting", "replace"]


def replace(patches: Patches) -> None:
    """Watch the collectives until the patches are undone."""
    if not torch.distributed.is_available():
        return
    from torch.distributed import ProcessGroup, Work

    for owner, names in ((ProcessGroup, COMMUNICATORS), (Work, ("wait", "synchronize"))):
        for name in names:
            if name in vars(owner):
                patches.replace(owner, name, forgetting(getattr(owner, name)))


def forgetting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that writes tensors and leaves their versions as they are."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            forget_all_edited()

    return call
