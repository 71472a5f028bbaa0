"""What stands behind the replacements of the eager mode, installed or not.

Owns the references; `intercept` sets them, everybody calls through them.
"""

from __future__ import annotations

from typing import Any

from amanda_driver_tf._eager.symbols import backprop, execute, forwardprop, pywrap_tfe, record

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
        self.fast_path: Any = pywrap_tfe.TFE_Py_FastPathExecute
        self.execute: Any = execute.execute
        self.gradient_function: Any = backprop._gradient_function
        self.jvp: Any = forwardprop._jvp_dispatch
        self.record_operation: Any = record.record_operation
        self.stop_recording: Any = record.stop_recording


ORIGINALS = _Originals()


def record_gradient(name: str, inputs: Any, attrs: Any, outputs: Any) -> None:
    """Tell the tapes of an execution, in TensorFlow's own way."""
    execute.record_gradient(name, inputs, attrs, outputs)
