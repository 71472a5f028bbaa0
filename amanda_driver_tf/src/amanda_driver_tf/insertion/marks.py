"""Nodes that record marks of tools without Python.

Owns the op `AmandaMark`, which the native extension registers with TensorFlow's C API, and the
choice of which observers become such nodes. Where that is not possible, a mark is a host routine.
"""

from __future__ import annotations

import ctypes
import functools
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from amanda_core.driver_kit import Marks, Step
from amanda_driver_tf.graphs.body import Value
from amanda_driver_tf.insertion.function_def_writing import attr_int, attr_types, plain
from amanda_driver_tf.insertion.nodes import Mark
from amanda_driver_tf.insertion.step_functions import Layout
from amanda_driver_tf.interceptor_choice import INTERCEPTORS
from amanda_driver_tf.tensorflow_internals import extension

__all__ = ["OP_TYPE", "mark_of"]

OP_TYPE = "AmandaMark"
_CLOCK = "clock_gettime(CLOCK_MONOTONIC)"
#: The functions of TensorFlow's C API that the extension calls, in its order.
_FUNCTIONS = (
    "TF_NewStatus",
    "TF_DeleteStatus",
    "TF_GetCode",
    "TF_NewOpDefinitionBuilder",
    "TF_OpDefinitionBuilderAddAttr",
    "TF_OpDefinitionBuilderAddInput",
    "TF_OpDefinitionBuilderSetIsStateful",
    "TF_OpDefinitionBuilderSetShapeInferenceFunction",
    "TF_RegisterOpDefinition",
    "TF_NewKernelBuilder",
    "TF_RegisterKernelBuilder",
    "TF_OpKernelConstruction_GetAttrInt64",
)
#: Number of a journal -> the marks that it is for.
_MARKS: weakref.WeakValueDictionary[int, Marks] = weakref.WeakValueDictionary()


def mark_of(name: str, step: Step, layout: Layout, values: Sequence[Value]) -> Mark | None:
    """Return a node that records a mark; None if the step is to be called as a host routine.

    Args:
        name: The wished name of the node.
        step: An observing step.
        layout: Layout of the positions of the values.
        values: What the routine would get. The node waits for it.
    """
    marks = Marks.of(step.action.routine)
    # A routine is not called for gradients all of which are missing.
    if marks is None or not all(layout.present):
        return None
    if marks.clock is not time.perf_counter_ns or not _is_registered():
        return None
    journal = marks.source("tensorflow", extension.native.Journal)
    _MARKS[journal.number] = marks
    attributes = {
        "journal": attr_int(journal.number),
        "number": attr_int(step.action.kwargs["number"]),
        "Tin": attr_types([plain(value.dtype) for value in values]),
    }
    return Mark(name, OP_TYPE, values, (), attributes, ())


@functools.cache
def _is_registered() -> bool:
    """Register the op; return False if this installation cannot."""
    if INTERCEPTORS.choice().name != "native" or not hasattr(extension.native, "Journal"):
        return False
    if time.get_clock_info("perf_counter").implementation != _CLOCK:
        return False
    folder = Path(tf.sysconfig.get_lib())
    try:
        library = ctypes.CDLL(str(next(folder.glob("libtensorflow_framework.so*"))))
        addresses = tuple(
            ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in _FUNCTIONS
        )
        extension.native.register_marks(OP_TYPE, _full, addresses)
    except (AttributeError, OSError, StopIteration, RuntimeError):
        return False  # Functions are missing, or TensorFlow refused the op.
    return True


def _full(journal: int) -> Any:
    """Let a tool take its marks, of which there are many."""
    marks = _MARKS.get(journal)
    if marks is not None:
        marks.full()
