"""CUDA graphs, which are recorded once and replayed without calling operators.

While one is recorded nothing is computed, so there are no values that routines could get, and what
they would run would be replayed after `apply` has ended. Tools do not see it, and are told.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from amanda_core import CoverageGap
from amanda_core.patching import Patch
from amanda_driver_torch._thread.state import STATE

__all__ = ["GAP", "replace"]

GAP = CoverageGap(
    "CUDA graphs", "no values exist while one is recorded, and its replays call no operators"
)


def replace() -> Callable[[], object]:
    """Watch recordings and replays; return the function that undoes it."""
    kind: Any = torch.cuda.CUDAGraph
    patches = [
        Patch(kind, "capture_begin", _beginning(kind.capture_begin)),
        Patch(kind, "capture_end", _ending(kind.capture_end)),
        Patch(kind, "replay", _replaying(kind.replay)),
    ]

    def undo() -> None:
        for patch in patches:
            patch.undo()
        while STATE.recordings:
            _end()

    return undo


def _beginning(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def begin(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _tell()
        STATE.recordings += 1
        STATE.quiet += 1
        return result

    return begin


def _ending(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def end(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            if STATE.recordings:
                _end()

    return end


def _end() -> None:
    STATE.recordings -= 1
    STATE.quiet -= 1


def _replaying(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replay(*args: Any, **kwargs: Any) -> Any:
        _tell()
        return original(*args, **kwargs)

    return replay


def _tell() -> None:
    attachment = STATE.attachment
    if attachment is not None and attachment.watching():
        attachment.session.warn_once(f"{GAP.what} are not instrumented: {GAP.why}.")
