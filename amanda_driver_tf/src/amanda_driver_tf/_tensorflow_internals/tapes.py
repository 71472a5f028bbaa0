"""C++ functions about the tapes of a thread, and whether a thread executes eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amanda_driver_tf._tensorflow_internals.modules import context, core, pywrap_tfe

__all__ = [
    "FallbackException",
    "executes_eagerly",
    "is_initialized",
    "is_recorded",
    "no_tape",
    "register_gradient_function",
    "register_jvp_function",
    "restart_tapes",
    "stop_tapes",
    "tapes_stopped",
]

#: Raised by the fast path if `execute.execute` must execute the op.
FallbackException: Any = core._FallbackException

#: Whether this thread has no recording tape.
no_tape: Callable[[], bool] = pywrap_tfe.TFE_Py_TapeSetIsEmpty
#: Whether a tape or forward accumulator tracks any of the tensors.
is_recorded: Callable[[Sequence[Any]], bool] = pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop
#: Whether recording is stopped in this thread.
tapes_stopped: Callable[[], bool] = pywrap_tfe.TFE_Py_TapeSetIsStopped
stop_tapes: Callable[[], None] = pywrap_tfe.TFE_Py_TapeSetStopOnThread
restart_tapes: Callable[[], None] = pywrap_tfe.TFE_Py_TapeSetRestartOnThread

#: Sets the function that every tape calls for the gradient of an op.
register_gradient_function: Callable[..., None] = pywrap_tfe.TFE_Py_RegisterGradientFunction
#: Sets the function that every forward accumulator calls for the tangents of an op.
register_jvp_function: Callable[..., None] = pywrap_tfe.TFE_Py_RegisterJVPFunction


def executes_eagerly() -> bool:
    """Return True if the calling thread executes operators eagerly instead of building a graph."""
    # The same test as in the generated op wrappers, as it is fast: it runs at every layer call.
    found = context._context or context.context()
    return bool(found._thread_local_data.is_eager)


def is_initialized() -> bool:
    """Return True if the runtime has started, so that a test would not start it."""
    return context._context is not None and context._context._initialized
