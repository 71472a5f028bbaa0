"""Frames of the interpreter's stack: to whom their code belongs.

Owns the facts that the rule of op identity needs about frames. The rule is in the core's `sites`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import amanda_core
from amanda_core.driver_kit import FRAMEWORK, OWN, QUIET, STOP, USER
from amanda_driver_tf.tensorflow_internals.names import (
    MODULES_BESIDE_THE_MODEL,
    MODULES_PASSED_THROUGH,
)

__all__ = ["BETWEEN", "BOUNDARY", "LAYERS", "is_swallowing", "kind_of"]

#: Codes at which a call site ends: calls of layers and of gradient functions.
BOUNDARY: set[CodeType] = set()

# By folder and not by name, since a test runner may give modules other names.
_OWN = tuple(
    str(folder) + os.sep
    for folder in (Path(amanda_core.__file__).parent, Path(__file__).parents[1])
)

#: Libraries that may stand between a line of the program and TensorFlow.
BETWEEN = ("keras", "tf_keras")
_LIBRARIES = frozenset({"tensorflow", *BETWEEN})
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
#: Modules that define the base class of layers.
LAYERS = ("keras.src.layers.layer", "tf_keras.src.engine.base_layer")


def kind_of(code: CodeType, namespace: Mapping[str, Any]) -> int:
    """Return the kind of a frame that runs `code`, for call sites."""
    if code in BOUNDARY:
        return STOP
    if code.co_filename.startswith(_OWN):
        return OWN
    module = str(namespace.get("__name__", ""))
    if module.partition(".")[0] not in _LIBRARIES:
        return USER
    if module.startswith(_NOT_THE_MODEL):
        return QUIET
    if module in LAYERS and code.co_name == "__call__":
        return STOP  # The call of a layer, which `keras_calls` wraps.
    # Frames that occur in each call of an operator do not distinguish call sites.
    return OWN if module.startswith(_PASSAGES) else FRAMEWORK


def is_swallowing() -> bool:
    """Return True if the caller is an overloaded operator, which tries the reflected one on an
    error.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and kind_of(frame.f_code, frame.f_globals) not in (USER, STOP):
        if frame.f_code.co_name == "binary_op_wrapper":
            return True
        frame = frame.f_back
    return False
