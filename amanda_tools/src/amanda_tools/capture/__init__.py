"""Chosen values of modules and operators, by call, row and position of the sequence."""

from amanda_tools.capture.result import (
    CapturedOp,
    CapturedSequence,
    CapturedValue,
    CaptureResult,
    load_capture,
)
from amanda_tools.capture.tool import Capture

__all__ = [
    "Capture",
    "CaptureResult",
    "CapturedOp",
    "CapturedSequence",
    "CapturedValue",
    "load_capture",
]
