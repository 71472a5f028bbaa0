"""Lets `torch.utils.swap_tensors` exchange the contents of tensors while tools are applied.

torch refuses to swap a tensor that has weak references. Ours refer to the tensor object, which
stays the same, so `swap_tensors` ignores them. They are all gone once no tool is applied.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from amanda_core.driver_kit import Ref, let_go
from amanda_driver_torch.threads.state import call_quietly
from amanda_driver_torch.torch_internals.extension import native
from amanda_driver_torch.torch_internals.internals import DisableTorchFunctionSubclass, is_view

__all__ = ["replace", "swap_tensors"]


class _WeakReferences:
    """Replaces the module `weakref` inside `swap_tensors`."""

    @staticmethod
    def getweakrefs(tensor: Any) -> list[Any]:
        """Return the weak references to a tensor that are not ours."""
        others = [one for one in weakref.getweakrefs(tensor) if not isinstance(one, Ref)]
        died = None if native is None else native.parameter_died
        return [one for one in others if died is None or one.__callback__ is not died]


def replace(afterwards: Callable[[Callable[[], None]], None]) -> None:
    """Make `swap_tensors` ignore our references, and register what undoes this.

    Its code is replaced, so that references imported earlier run it, too.
    """
    function: Any = torch.utils.swap_tensors
    original = function.__code__

    def undo() -> None:
        function.__code__ = original
        let_go(torch.Tensor, _witness)

    afterwards(undo)
    _original["swap_tensors"] = types.FunctionType(
        original,
        {**function.__globals__, "weakref": _WeakReferences},
        function.__name__,
        function.__defaults__,
    )
    function.__code__ = _carrier.__code__


_original: dict[str, Callable[[Any, Any], None]] = {}


def _carrier(t1: Any, t2: Any) -> Any:
    # Only its code is used. It runs with the globals of torch.utils.
    from amanda_driver_torch.interception.swap_tensors import swap_tensors

    return swap_tensors(t1, t2)


def swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
    """Call `torch.utils.swap_tensors` in a thread with an attached session."""
    call_quietly(_original["swap_tensors"], t1, t2)


def _witness(tensor: torch.Tensor) -> tuple[object, object] | None:
    """Return an object that lives exactly as long as the content of a tensor: its storage.

    Returns None for views and for tensors without a storage.
    """
    with DisableTorchFunctionSubclass():
        try:
            if is_view(tensor):
                return None
            return tensor.untyped_storage(), (type(tensor), tensor.dtype)
        except (RuntimeError, NotImplementedError):
            return None  # Sparse tensors and many subclasses have no storage.
