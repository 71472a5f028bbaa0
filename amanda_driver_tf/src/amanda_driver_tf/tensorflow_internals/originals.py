"""The functions that the eager mode replaces, callable whether or not they are replaced now.

Owns the references. `interception.eager_operators` sets them, and everybody calls through them.
"""

from __future__ import annotations

from typing import Any

from amanda_driver_tf.tensorflow_internals.entry_points import (
    EXECUTE,
    FAST_PATH,
    GRADIENT_FUNCTION,
    JVP,
    RECORD_OPERATION,
    STOP_RECORDING,
)
from amanda_driver_tf.tensorflow_internals.modules import execute

__all__ = ["ORIGINALS", "PAIR", "record_gradient"]

#: Name of the attribute that passes an op's record from the tape to its gradient function.
#: TensorFlow passes unknown attributes on.
PAIR = "_amanda_eager"


class _Originals:
    """The originals, as they were last found."""

    def __init__(self) -> None:
        self.find()

    def find(self) -> None:
        """Read the current functions; must be called while nothing is replaced."""
        self.fast_path: Any = FAST_PATH.current
        self.execute: Any = EXECUTE.current
        self.gradient_function: Any = GRADIENT_FUNCTION.current
        self.jvp: Any = JVP.current
        self.record_operation: Any = RECORD_OPERATION.current
        self.stop_recording: Any = STOP_RECORDING.current


ORIGINALS = _Originals()


def record_gradient(name: str, inputs: Any, attrs: Any, outputs: Any) -> None:
    """Record an execution on the tapes, in TensorFlow's own way."""
    execute.record_gradient(name, inputs, attrs, outputs)
