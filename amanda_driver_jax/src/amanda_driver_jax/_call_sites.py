"""Call sites: which frames are JAX's, which are the user's, and the op that a call belongs to.

Owns the driver's rules for the core's identity rule. Occurrences are counted in each trace, because
arrays are replaced in each training step and do not distinguish ops.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Mapping
from functools import partial
from types import CodeType, FrameType
from typing import Any, NamedTuple

import jax

from amanda_core import sites
from amanda_core.execution import OpRecord
from amanda_core.path_sites import PathSites
from amanda_core.zones import zone_of
from amanda_driver_jax import _jax_internals as internals

_JAX = os.path.dirname(jax.__file__) + os.sep
_HERE = os.path.dirname(__file__) + os.sep
_CORE = os.path.dirname(sys.modules["amanda_core"].__file__ or "") + os.sep
#: Libraries whose layers call operators for the user.
_LIBRARIES = frozenset({"equinox", "flax", "haiku", "keras", "optax", "orbax"})

#: The named scope of what was traced with tools. A program that evaluates its jaxpr is done.
_MARK = "amanda:op"

_OURS, _INSIDE, _API, _FORWARDING, _EVALUATION, _LIBRARY, _USERS = range(7)
_sides: dict[CodeType, int] = {}


def is_library_code(code: CodeType | None) -> bool:
    """Return True if a function is a part of JAX."""
    return code is not None and code.co_filename.startswith(_JAX)


def is_library_source(source: str) -> bool:
    """Return True if ``function at file:line`` is a part of JAX."""
    return _JAX in source


def _side_of(code: CodeType) -> int:
    side = _sides.get(code)
    if side is None:
        file = code.co_filename
        if file.startswith((_HERE, _CORE, contextlib.__file__)):
            side = _OURS
        elif file.startswith(_JAX):
            side = _INSIDE if file.endswith(internals.INTERNAL_FILES) else _LIBRARY
            side = (
                _API if file.endswith(internals.API_FILE) and code.co_name != "device_put" else side
            )
            side = _FORWARDING if code.co_name in internals.FORWARDING_FUNCTIONS else side
            side = _EVALUATION if code.co_name == "eval_jaxpr" else side
        else:
            side = _USERS
        _sides[code] = side
    return side


def is_users_frame(frame: FrameType) -> bool:
    """Return True for a frame of a program or of a library on JAX."""
    return _side_of(frame.f_code) == _USERS


def is_user_call(frame: FrameType | None) -> bool:
    """Return True if an operator was called by a program, and not by JAX's own transformations."""
    forwarded = False  # By a transformation, to the function that it transforms.
    while frame is not None:
        side = _side_of(frame.f_code)
        if side == _USERS:
            return True
        forwarded |= side == _FORWARDING
        if side == _INSIDE or (side == _API and not forwarded):
            return False
        if side == _EVALUATION and _MARK in internals.named_scopes():
            return False
        frame = frame.f_back
    return False


def marked() -> contextlib.AbstractContextManager[object]:
    """Mark what is traced inside `with` as a part of an instrumented operator."""
    return contextlib.nullcontext() if internals.is_top_level() else jax.named_scope(_MARK)


def _kind_of(code: CodeType, namespace: Mapping[str, Any]) -> int:
    side = _side_of(code)
    if side == _OURS:
        # What lies around the call that traces a function differs from call to call.
        return sites.STOP if code.co_name == "run_traced" else sites.OWN
    if side == _USERS:
        library = str(namespace.get("__name__", "")).partition(".")[0] in _LIBRARIES
        return sites.FRAMEWORK if library else sites.USER
    internal = side != _LIBRARY or code.co_filename.endswith(
        internals.INTERNAL_FILES + internals.PLUMBING_FILES
    )
    return sites.OWN if internal else sites.FRAMEWORK


class Place(NamedTuple):
    """Where a module that runs is.

    Attributes:
        model: The label of its model.
        path: Its path there.
        around: The frame of its method; None if the path does not tell which module it is.
    """

    model: str
    path: str
    around: FrameType | None


class OpTable(PathSites):
    """The ops of one mode that were seen so far. It resumes with the contexts.

    Args:
        namespace: The namespace of the mode.
    """

    def __init__(self, namespace: str) -> None:
        rules = sites.Rules(kind_of=_kind_of, zone_of=partial(zone_of, {"optax": "optimizer"}))
        super().__init__(rules, namespace)
        self._counts: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()

    def called(self, op_type: str, place: Place | None) -> OpRecord:
        """Return the op that is being called.

        Args:
            op_type: Its type.
            place: Where the module that runs is; None outside of any.
        """
        model, path, around = place or ("", _named_scope(), None)
        counts: dict[Any, int] = {}
        if not internals.is_top_level():
            model = model or "traced"
            counts = self._counts.setdefault(internals.current_trace(), counts)
        # Where the module is called does not matter, like its caller.
        return self.locate(op_type, sys._getframe(1), model, path, counts, around)


def _named_scope() -> str:
    """Return the path of the scopes that `jax.named_scope` opened."""
    return "/".join(name for name in internals.named_scopes() if name != _MARK)


def is_traced() -> bool:
    """Return True inside the trace of a function that JAX compiles."""
    trace = internals.current_trace()
    while trace is not None:
        if type(trace).__name__ == "DynamicJaxprTrace":
            return True
        trace = internals.parent_of(trace)
    return False
