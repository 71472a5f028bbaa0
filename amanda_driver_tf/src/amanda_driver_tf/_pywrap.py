"""What is called of TensorFlow's C++ bindings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensorflow.python import pywrap_tfe

__all__ = ["register_gradient_function", "restart_tapes", "stop_tapes", "tapes_stopped"]


def register_gradient_function(function: Callable[..., Any]) -> None:
    """Make `function` what every tape calls for the gradient of an op."""
    pywrap_tfe.TFE_Py_RegisterGradientFunction(function)


def tapes_stopped() -> bool:
    """Whether the tapes of this thread do not record."""
    return bool(pywrap_tfe.TFE_Py_TapeSetIsStopped())


def stop_tapes() -> None:
    """Let the tapes of this thread record nothing."""
    pywrap_tfe.TFE_Py_TapeSetStopOnThread()


def restart_tapes() -> None:
    """Let the tapes of this thread record again."""
    pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
