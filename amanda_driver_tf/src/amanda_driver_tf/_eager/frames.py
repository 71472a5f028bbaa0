"""Frames of the interpreter's stack: whose code they run, and what of them makes up a call site.

Owns the classification of code and the labels that make a call site the same in another process.
Which call sites there are, `sites` says.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

import amanda_core
from amanda_core.identity import call_offsets
from amanda_driver_tf._tensorflow_internals.names import (
    MODULES_BESIDE_THE_MODEL,
    MODULES_OF_INITIALIZERS,
    MODULES_PASSED_THROUGH,
)

__all__ = [
    "BOUNDARY",
    "LIBRARY",
    "SKIPPED",
    "STOP",
    "UNWATCHED",
    "USER",
    "Code",
    "Codes",
    "is_swallowing",
    "source_of",
    "user_stacklevel",
    "zone_of",
]

#: What a frame counts as. SKIPPED: says nothing of where an op is called. UNWATCHED: what it calls
#: is none of the user's model. STOP: a call site ends before it.
SKIPPED, LIBRARY, USER, UNWATCHED, STOP = range(5)

#: Codes at which a call site ends: calls of layers and of gradient functions.
BOUNDARY: set[CodeType] = set()

# By folder and not by name: a test runner may name modules below the package.
_CORE, _DRIVER = amanda_core.__file__, os.path.dirname(__file__)
_OWN = tuple(os.path.dirname(str(path)) + os.sep for path in (_CORE, _DRIVER))

_LIBRARIES = frozenset({"tensorflow", "keras", "tf_keras"})
_PASSAGES = (
    *MODULES_PASSED_THROUGH,
    "keras.src.ops.operation",
    "keras.src.utils.traceback_utils",
    "tf_keras.src.utils.traceback_utils",
)
_NOT_THE_MODEL = (
    *MODULES_BESIDE_THE_MODEL,
    "keras.src.trainers.data_adapters",
    "keras.src.saving.",
    "tf_keras.src.engine.data_adapter",
    "tf_keras.src.saving.",
)
_OPTIMIZERS = (
    "keras.src.optimizers.",
    "keras.src.backend.tensorflow.optimizer",
    "tf_keras.src.optimizers.",
)
_INITIALIZERS = (
    "keras.src.initializers.",
    "tf_keras.src.initializers.",
    *MODULES_OF_INITIALIZERS,
)
_LAYERS = ("keras.src.layers.layer", "tf_keras.src.engine.base_layer")

# Codes made by exec() are new objects each time; the table is rebuilt when it gets this large.
_CODES = 16384


class Code:
    """What is known of one code object; `number` tells labels apart within this process.

    Attributes:
        offsets: Where it calls from, by ``f_lasti // 2``.
    """

    __slots__ = ("code", "kind", "label", "number", "offsets")

    def __init__(self, code: CodeType, kind: int, label: tuple[str, str, int], number: int) -> None:
        self.code, self.kind, self.label, self.number = code, kind, label, number
        self.offsets = call_offsets(code)


class Codes:
    """The code objects met so far, by identity."""

    def __init__(self) -> None:
        self.known: dict[int, Code] = {}
        self._numbers: dict[tuple[int, tuple[str, str, int]], int] = {}

    def add(self, frame: FrameType) -> Code:
        """Classify the code of a frame that is not known yet."""
        if len(self.known) > _CODES:
            self.known.clear()
        code = frame.f_code
        # The first line tells apart what exec() and lambdas leave without a name of their own;
        # only there, so that an edit above a named function changes no id.
        name = getattr(code, "co_qualname", code.co_name)
        line = code.co_firstlineno if "<" in code.co_name or not hasattr(code, "co_qualname") else 0
        label = (_module(frame), name, line)
        kind = _kind(frame)
        number = self._numbers.setdefault((kind, label), len(self._numbers) + 1)
        # It keeps the code alive, so its id stays its own.
        known = self.known[id(code)] = Code(code, kind, label, number)
        return known


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _kind(frame: FrameType) -> int:
    if frame.f_code in BOUNDARY:
        return STOP
    if frame.f_code.co_filename.startswith(_OWN):
        return SKIPPED
    module = _module(frame)
    if module.partition(".")[0] not in _LIBRARIES:
        return USER
    if module.startswith(_NOT_THE_MODEL):
        return UNWATCHED
    return SKIPPED if module.startswith(_PASSAGES) else LIBRARY


def source_of(frame: FrameType | None) -> str | None:
    """``file:line`` of the innermost frame of the user's."""
    while frame is not None:
        if _kind(frame) == USER:
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def zone_of(frame: FrameType | None) -> str:
    """Which part of a program runs, by the frames from the call up to the user's first."""
    while frame is not None and frame.f_code not in BOUNDARY:
        module = _module(frame)
        if module.startswith(_OPTIMIZERS):
            return "optimizer"
        if module.startswith(_INITIALIZERS):
            return "init"
        if frame.f_code.co_name in ("build", "__init__") and _is_layer(frame.f_locals.get("self")):
            return "init"
        if _kind(frame) == USER:
            break
        frame = frame.f_back
    return "model"


def is_swallowing(frame: FrameType | None) -> bool:
    """Return True if the caller is an overloaded operator, which tries the reflected one next."""
    while frame is not None and _kind(frame) not in (USER, STOP):
        if frame.f_code.co_name == "binary_op_wrapper":
            return True
        frame = frame.f_back
    return False


def _is_layer(value: object) -> bool:
    loaded = [sys.modules[name] for name in _LAYERS if name in sys.modules]
    return any(isinstance(value, module.Layer) for module in loaded)


def user_stacklevel() -> int:
    """The `stacklevel` with which a warning of the caller's points at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_OWN)
        or _module(frame).partition(".")[0] in _LIBRARIES
        or _module(frame) == "contextlib"
    ):
        level, frame = level + 1, frame.f_back
    return level
