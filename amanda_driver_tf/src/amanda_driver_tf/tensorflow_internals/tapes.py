"""C++ functions about the tapes of a thread, and whether a thread executes eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from amanda_driver_tf.tensorflow_internals.modules import context, core, pywrap_tfe

R = TypeVar("R")

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


def call_unrecorded(function: Callable[..., R], *args: Any) -> R:
    """Call `function` while no tape of this thread records."""
    # Not `stop_recording`, whose end an exception may skip.
    stopped = tapes_stopped()
    try:
        if not stopped:
            stop_tapes()
        result = function(*args)
        if not stopped:
            restart_tapes()
        return result
    except BaseException:
        if not stopped:
            restart_tapes()
        raise


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
