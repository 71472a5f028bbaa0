"""What stands behind the replacements of the eager mode, installed or not.

Owns the references; `intercept` sets them, everybody calls through them.
"""

from __future__ import annotations

from typing import Any

from amanda_driver_tf._tensorflow_internals.entry_points import (
    EXECUTE,
    FAST_PATH,
    GRADIENT_FUNCTION,
    JVP,
    RECORD_OPERATION,
    STOP_RECORDING,
)
from amanda_driver_tf._tensorflow_internals.modules import (
    execute,
)

__all__ = ["ORIGINALS", "PAIR", "record_gradient"]

#: Name of the attribute by which an op on a tape tells its gradient function which op it is.
#: TensorFlow hands attributes on that it does not know.
PAIR = "_amanda_eager"


class _Originals:
    """The originals, as they were found last."""

    def __init__(self) -> None:
        self.find()

    def find(self) -> None:
        """Take what stands there now; to be called while nothing is replaced."""
        self.fast_path: Any = FAST_PATH.current
        self.execute: Any = EXECUTE.current
        self.gradient_function: Any = GRADIENT_FUNCTION.current
        self.jvp: Any = JVP.current
        self.record_operation: Any = RECORD_OPERATION.current
        self.stop_recording: Any = STOP_RECORDING.current


ORIGINALS = _Originals()


def record_gradient(name: str, inputs: Any, attrs: Any, outputs: Any) -> None:
    """Tell the tapes of an execution, in TensorFlow's own way."""
    execute.record_gradient(name, inputs, attrs, outputs)
