"""Frames of the interpreter's stack: whose code they run.

Owns the question which frames are the user's, torch's or this driver's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import amanda_core
from amanda_driver_torch.torch_internals.distributed import Unit, unit_of
from amanda_driver_torch.torch_internals.entry_points import (
    COMPILED_FRAMES,
    DECORATING,
    ENGINE_CALLERS,
)
from amanda_driver_torch.torch_internals.internals import (
    COPIES,
    LOOKED_AWAY,
    NUMBER_CONVERSION,
    SERIALIZERS,
    TENSOR_METHODS,
)

__all__ = [
    "BOUNDARY",
    "FORWARDS",
    "in_compiled_callable",
    "is_own",
    "is_torchs",
    "looks_away",
    "unit_around",
]

#: Codes at which a call site ends, by id, since some that Dynamo makes cannot be hashed: what lies
#: further out may differ between a first run and a recomputation. Module calls, checkpointed
#: functions and closures of optimizers add theirs. Which line begins a backward pass does not
#: distinguish what runs in it.
BOUNDARY: dict[int, CodeType] = {id(code): code for code in ENGINE_CALLERS}

#: Codes of this driver that run the `forward` of a module in its place, by id.
FORWARDS: dict[int, CodeType] = {}

# By folder and not by name: a test runner may name modules below the package.
_OWN = tuple(
    str(folder) + os.sep
    for folder in (Path(amanda_core.__file__).parent, Path(__file__).parents[1])
)

_TORCHS = frozenset({"torch", *DECORATING})


def is_torchs(namespace: Mapping[str, Any]) -> bool:
    """Return True if code with these globals is of torch's own Python modules."""
    return str(namespace.get("__name__", "")).partition(".")[0] in _TORCHS


def is_own(code: CodeType) -> bool:
    """Return True if code is of the core or of this driver."""
    return code.co_filename.startswith(_OWN)


def in_compiled_callable(eager: Mapping[int, CodeType]) -> bool:
    """Return True if this thread is in code of a compiled callable that runs eagerly.

    Args:
        eager: The code of such frames by id; that of torch's wrapper if callables run eagerly.
    """
    frame: FrameType | None = sys._getframe(1)
    found = False
    while frame is not None:
        found = found or id(frame.f_code) in eager
        if (
            found
            and frame.f_code.co_name == COMPILED_FRAMES.wrapper
            and frame.f_globals.get("__name__") == COMPILED_FRAMES.module
        ):
            return True
        frame = frame.f_back
    return False


def unit_around(frame: FrameType | None) -> tuple[Unit | None, FrameType | None]:
    """Return the unit of FSDP that communicates in the frames from this one outwards, if there is
    one, and its frame.
    """
    while frame is not None and id(frame.f_code) not in BOUNDARY:
        if (unit := unit_of(frame)) is not None:
            return unit, frame
        frame = frame.f_back
    return None, None


def looks_away(code: CodeType, namespace: Mapping[str, Any]) -> bool:
    """Return True if code is of a function whose operators are none of the model's."""
    module, name = namespace.get("__name__"), code.co_name
    # Comprehensions and functions in a method have frames of their own.
    parts = getattr(code, "co_qualname", name).split(".")
    if not COPIES.isdisjoint(parts) or f"{module}.".startswith(SERIALIZERS):
        return True
    is_method = module == TENSOR_METHODS and name in LOOKED_AWAY
    return is_method or (module, name) == NUMBER_CONVERSION
