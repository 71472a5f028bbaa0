"""Frames of the interpreter's stack: whose code they run.

Owns the question which frames are the user's, torch's or this driver's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import CodeType
from typing import Any

import amanda_core
from amanda_driver_torch import _state

__all__ = ["LOOKED_AWAY", "is_own", "is_torchs", "looks_away", "user_stacklevel"]

# By folder and not by name: a test runner may name modules below the package.
_OWN = tuple(os.path.dirname(str(package.__file__)) + os.sep for package in (amanda_core, _state))


# Functions that are not made of the model's operators: the engine has its own way in, and the
# rest looks at a tensor, copies it or moves it between processes.
LOOKED_AWAY = frozenset(
    {"backward", "grad", "register_hook", "register_post_accumulate_grad_hook"}
    | {"__repr__", "__format__", "__deepcopy__", "__reduce_ex__", "__setstate__", "__dir__"}
    | {"__len__", "__hash__", "__array__", "__dlpack__", "__dlpack_device__", "share_memory_"}
    | {"is_shared", "storage", "storage_type", "_typed_storage", "_reduce_ex_internal"}
)


def is_torchs(namespace: Mapping[str, Any]) -> bool:
    """Whether code with these globals is of torch's own Python modules."""
    return str(namespace.get("__name__", "")).partition(".")[0] == "torch"


def is_own(code: CodeType) -> bool:
    """Whether code is of the core or of this driver."""
    return code.co_filename.startswith(_OWN)


def looks_away(code: CodeType, namespace: Mapping[str, Any]) -> bool:
    """Whether code is of a method of tensors that is not made of the model's operators."""
    return namespace.get("__name__") == "torch._tensor" and code.co_name in LOOKED_AWAY


def user_stacklevel() -> int:
    """The `stacklevel` with which a warning of the caller's points at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and (is_torchs(frame.f_globals) or is_own(frame.f_code)):
        level, frame = level + 1, frame.f_back
    return level
