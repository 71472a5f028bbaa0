"""Call sites: which frames are JAX's, which are the user's, and the op that a call belongs to.

Owns the driver's rules for the core's identity rule. Occurrences are counted in each trace, because
arrays are replaced in each training step and do not distinguish ops.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any, TypeVar

import jax

from amanda_core.driver_kit import FRAMEWORK, OWN, STOP, USER, OpRecord, Rules
from amanda_driver_jax import jax_internals as internals
from amanda_driver_jax.identity.path_modules import ModulePlace
from amanda_driver_jax.identity.path_sites import PathSites
from amanda_driver_jax.identity.zones import zone_of_call
from amanda_driver_jax.trace_keys import LOCAL
from amanda_driver_jax.vocabulary import DECLARATIONS

R = TypeVar("R")

_JAX = os.path.dirname(jax.__file__) + os.sep
_OURS = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.dirname(sys.modules["amanda_core"].__file__ or "") + os.sep,
    contextlib.__file__,
)
#: Its functions do not name what they call.
_MAPPING = "jax/_src/pmap.py".replace("/", os.sep)
_NAMES = DECLARATIONS.names
#: The named scope of what was traced with tools. A program that evaluates its jaxpr is done.
_MARK = "amanda:op"

#: Whose a frame is: ours; JAX's, which runs operators of its own, is a transformation that users
#: call, calls the function that is transformed, evaluates a jaxpr, lies between any operator and
#: its caller, or is an operator; the user's.
_OWN, _INSIDE, _API, _FORWARDING, _EVALUATION, _PLUMBING, _LIBRARY, _USERS = range(8)
#: Where no module runs, and no named scope is.
_EAGER = ModulePlace("", "")
#: By the id of a code object, which is kept: whose its frames are. To hash it takes a microsecond.
_SIDES: dict[int, tuple[int, CodeType]] = {}


def is_library_code(code: CodeType | None) -> bool:
    """Return True if a function is a part of JAX, and not around what `jax.pmap` maps."""
    file = "" if code is None else code.co_filename
    return file.startswith(_JAX) and not file.endswith(_MAPPING)


def is_library_source(source: str) -> bool:
    """Return True if ``function at file:line`` is a part of JAX."""
    return _JAX in source


def is_users_code(code: CodeType) -> bool:
    """Return True for code of a program or of a library on JAX."""
    return _side_of(code) == _USERS


def _side_of(code: CodeType) -> int:
    side, _ = _SIDES.get(id(code)) or _SIDES.setdefault(id(code), (_find_side(code), code))
    return side


def _find_side(code: CodeType) -> int:
    file, name = code.co_filename, code.co_name
    if not file.startswith(_JAX):
        return _OWN if file.startswith(_OURS) else _USERS
    if name == "eval_jaxpr":
        return _EVALUATION
    if name in _NAMES["forwarding_functions"]:
        return _FORWARDING
    file = file.replace(os.sep, "/")
    if file.endswith(_NAMES["api_files"]) and name != "device_put":
        return _API
    if file.endswith(_NAMES["internal_files"]):
        return _INSIDE
    return _PLUMBING if file.endswith(_NAMES["plumbing_files"]) else _LIBRARY


def is_user_call(frame: FrameType | None) -> bool:
    """Return True if an operator was called by a program, and not by JAX's own transformations."""
    forwarded = False  # By a transformation, to the function that it transforms.
    while frame is not None:
        known = _SIDES.get(id(frame.f_code))  # As in `_side_of`, with one call less.
        side = _side_of(frame.f_code) if known is None else known[0]
        if side == _USERS:
            return True
        forwarded |= side == _FORWARDING
        evaluated = side == _EVALUATION and _MARK in internals.named_scopes()
        if evaluated or side == _INSIDE or (side == _API and not forwarded):
            return False
        frame = frame.f_back
    return False


def is_transposed(frame: FrameType | None) -> bool:
    """Return True in a function of which JAX transposes parts, such as a rule for tangents."""
    while frame is not None:
        code = frame.f_code
        if code.co_name in _NAMES["transposing_functions"] and code.co_filename.startswith(_JAX):
            return True
        frame = frame.f_back
    return False


def call_marked(function: Callable[..., R], *args: Any) -> R:
    """Call `function`, and mark what it traces as a part of an operator that is analysed there."""
    before = LOCAL.trace
    try:
        LOCAL.trace = internals.current_trace()
        result: R = internals.call_named(_MARK, function, *args)
        LOCAL.trace = before
        return result
    except BaseException:
        LOCAL.trace = before
        raise


def _kind_of(code: CodeType, namespace: Mapping[str, Any]) -> int:
    side = _side_of(code)
    if side == _OWN:
        # What lies around the call that traces a function differs from call to call.
        return STOP if code.co_name == "trace_arguments" else OWN
    if side == _USERS:
        library = str(namespace.get("__name__", "")).partition(".")[0] in _NAMES["libraries"]
        return FRAMEWORK if library else USER
    return FRAMEWORK if side == _LIBRARY else OWN


class OpTable(PathSites):
    """The ops of one mode that were seen so far. It resumes with the contexts.

    Args:
        namespace: The namespace of the mode.
    """

    def __init__(self, namespace: str) -> None:
        super().__init__(Rules(kind_of=_kind_of, zone_of=zone_of_call, is_layered=True), namespace)

    def called(
        self, op_type: str, place: ModulePlace | None, frame: FrameType, top: bool
    ) -> OpRecord:
        """Return the record of the op that is being called, and count this occurrence.

        Call it once for each call of an operator: in one trace, or in one call of a model, the next
        call from the same place is another op. The record is made at the first occurrence.

        Args:
            op_type: The type of the operator.
            place: Where the module that runs is; None outside of modules.
            frame: The frame at which the search for the call site begins, outwards.
            top: Whether the operator is called outside of all transformations of JAX.
        """
        part, arguments = None if top else internals.current_trace(), LOCAL.arguments
        layer = arguments[0].layer if arguments else ""
        for traced in reversed(arguments):
            # Each call of a function that runs in place is traced by itself.
            if not traced.in_place or getattr(part, "parent_trace", None) is not traced.around:
                break
            part = internals.trace_around(part)
        loop = LOCAL.loop
        if loop and internals.is_inside(part, loop.trace):
            # Each iteration may be differentiated by itself.
            part = None if loop.trace is internals.EVALUATION else loop.trace
        if part is None and loop and (place is None or not place.call or loop.has(place.call)):
            part = loop
        if place is None:
            named = internals.named_scopes()
            scopes = "/".join([name for name in named if name != _MARK]) if named else ""
            root = "" if part is None else "traced"
            place = ModulePlace(root, scopes) if root or scopes else _EAGER
        if layer:
            place = place._replace(path="/".join(filter(None, (layer, place.path))))
        # Where the module is called does not matter, like its caller.
        return self.locate(op_type, frame, place, part)
