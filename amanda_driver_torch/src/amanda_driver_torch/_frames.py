"""Frames of the interpreter's stack: whose code they run.

Owns the question which frames are the user's, torch's or this driver's.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

import amanda_core
from amanda_driver_torch import _state

__all__ = ["is_own", "is_torchs", "user_stacklevel"]

# By folder and not by name: a test runner may name modules below the package.
_OWN = tuple(os.path.dirname(str(package.__file__)) + os.sep for package in (amanda_core, _state))


def is_torchs(frame: FrameType) -> bool:
    """Whether the frame runs code of torch's own Python modules."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def is_own(frame: FrameType) -> bool:
    """Whether the frame runs code of the core or of this driver."""
    return frame.f_code.co_filename.startswith(_OWN)


def user_stacklevel() -> int:
    """The `stacklevel` with which a warning of the caller's points at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and (is_torchs(frame) or is_own(frame)):
        level, frame = level + 1, frame.f_back
    return level
