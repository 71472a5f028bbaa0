"""Frames of the interpreter's stack: whose code they run.

Owns the question which frames are the user's, torch's or this driver's.
"""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["is_own", "is_torchs", "user_stacklevel"]

_OWN = frozenset({"amanda", "amanda_core", "amanda_driver_torch"})


def _top(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def is_torchs(frame: FrameType) -> bool:
    """Whether the frame runs code of torch's own Python modules."""
    return _top(frame) == "torch"


def is_own(frame: FrameType) -> bool:
    """Whether the frame runs code of Amanda's."""
    return _top(frame) in _OWN


def user_stacklevel() -> int:
    """The `stacklevel` with which a warning of the caller's points at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and (is_torchs(frame) or is_own(frame)):
        level, frame = level + 1, frame.f_back
    return level
