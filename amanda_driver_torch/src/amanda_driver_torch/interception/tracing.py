"""Detects tracers and transforms that run a model on fake tensors.

Their operators are not executions, since there are no values that routines could get.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from amanda_driver_torch.torch_internals.internals import (
    FAKE_TENSOR_CLASSES,
    FAKE_TENSOR_MODES,
    dispatch_mode_at,
    dispatch_mode_count,
    functorch_active,
    tracing_state,
)

__all__ = ["FAKE_TENSOR_CHECKS", "IN_TRANSFORMS", "reason_to_ignore"]

#: The notice for operators in transforms of `torch.func`.
IN_TRANSFORMS = (
    "Operators inside torch.func transforms (vmap, grad, jvp, ...) run uninstrumented: only tools "
    "with `sees_transforms` are shown them."
)


#: If all of these return something false, only an argument's type can be a reason for
#: `reason_to_ignore`.
FAKE_TENSOR_CHECKS = (
    tracing_state,
    functorch_active,
    dispatch_mode_count,
)

_fake: dict[type, bool] = {torch.Tensor: False, torch.nn.Parameter: False, int: False}


def reason_to_ignore(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return why an operator that is about to run must not be instrumented.

    Args:
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        None if it is instrumented. Otherwise a notice for the user, or an empty string if nobody
        would expect instrumentation.
    """
    if tracing_state() is not None:
        return ""
    if functorch_active():
        return IN_TRANSFORMS
    for index in range(dispatch_mode_count()):
        if type(dispatch_mode_at(index)).__name__ in FAKE_TENSOR_MODES:
            return ""
    # Most calls have plain tensors alone, for which no function is called.
    for value in args:
        if _fake.get(type(value), True):
            break
    else:
        if not kwargs:
            return None
    return "" if _hold_fake_tensor(args) or _hold_fake_tensor(kwargs.values()) else None


def _hold_fake_tensor(values: Iterable[Any]) -> bool:
    """Return True if any value is a fake tensor, or contains one at any depth."""
    for value in values:
        kind = type(value)
        fake = _fake.get(kind)
        if fake is None:
            if isinstance(value, (list, tuple)):
                fake = _hold_fake_tensor(value)
            elif isinstance(value, dict):
                fake = _hold_fake_tensor(value.values())
            elif isinstance(value, slice):
                fake = _hold_fake_tensor((value.start, value.stop, value.step))
            else:
                fake = _fake[kind] = any(
                    base.__name__ in FAKE_TENSOR_CLASSES for base in kind.__mro__
                )
        if fake:
            return True
    return False
