"""Functions that write, read, export or trace a model work on it as it is without tools.

Owns their replacements. Their names are those of `torch_internals.entry_points`; `identity.frames`
knows the frames of their modules, for programs that have imported a function before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from amanda_core.driver_kit import ModelWriters
from amanda_driver_torch.threads.state import STATE, call_quietly
from amanda_driver_torch.torch_internals.entry_points import (
    FRAMES_UP,
    QUIET_ALWAYS,
    QUIET_FUNCTIONS,
    WRITERS,
)

__all__ = ["WRITING", "quiet_export", "quietly_called"]


def quietly_called(original: Callable[..., Any], writer: str = "") -> Callable[..., Any]:
    """Return a function that calls another one, whose operators tools do not see.

    Args:
        original: The function.
        writer: What the program calls it, if it writes the model for other programs.
    """

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # First: Dynamo traces only the original.
            return original(*args, **kwargs)
        if writer and not STATE.quiet and (attachment := STATE.attachment) is not None:
            attachment.session.warn_of_writer(writer)
        if FRAMES_UP in kwargs:  # torch.jit looks up names in the caller, beyond two of ours.
            kwargs[FRAMES_UP] += 2
        return call_quietly(original, *args, **kwargs)

    return call


def quiet_export(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return such a function for Dynamo's own export."""

    @functools.wraps(original)
    def export(*args: Any, **kwargs: Any) -> Any:
        result = quietly_called(original, "torch.export")(*args, **kwargs)
        # Without inputs, it returns the function that takes them.
        return quietly_called(result) if callable(result) else result

    return export


#: The functions, those of torch's first.
WRITING = ModelWriters(QUIET_FUNCTIONS, WRITERS, quietly_called, QUIET_ALWAYS)
