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

#: Raised by the fast path of an op, which is then executed by `execute.execute`.
FallbackException: Any = core._FallbackException

#: Whether no tape of this thread records.
no_tape: Callable[[], bool] = pywrap_tfe.TFE_Py_TapeSetIsEmpty
#: Whether a tape or forward accumulator follows one of some tensors.
is_recorded: Callable[[Sequence[Any]], bool] = pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop
#: Whether the tapes of this thread do not record now.
tapes_stopped: Callable[[], bool] = pywrap_tfe.TFE_Py_TapeSetIsStopped
stop_tapes: Callable[[], None] = pywrap_tfe.TFE_Py_TapeSetStopOnThread
restart_tapes: Callable[[], None] = pywrap_tfe.TFE_Py_TapeSetRestartOnThread

#: Makes a function what every tape calls for the gradient of an op.
register_gradient_function: Callable[..., None] = pywrap_tfe.TFE_Py_RegisterGradientFunction
#: Makes a function what every forward accumulator calls for the tangents of an op.
register_jvp_function: Callable[..., None] = pywrap_tfe.TFE_Py_RegisterJVPFunction


def executes_eagerly() -> bool:
    """Return True if the calling thread executes operators one by one and builds no graph."""
    # As the generated wrappers of ops find it out: this runs at every call of a layer.
    found = context._context or context.context()
    return bool(found._thread_local_data.is_eager)


def is_initialized() -> bool:
    """Return True if the runtime has started, so that trying something would not start it."""
    return context._context is not None and context._context._initialized
