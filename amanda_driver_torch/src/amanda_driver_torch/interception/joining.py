"""Other threads than the one that applied tools: how a session comes to them, and leaves."""

from __future__ import annotations

import threading
import time
from typing import Any

from amanda_core.driver_kit import THREAD, join
from amanda_driver_torch.interception.tracing import reason_to_ignore
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.extension import native
from amanda_driver_torch.torch_internals.internals import runs_backward

__all__ = ["ThreadState", "joins"]

#: Seconds that a session which leaves a thread waits for the operator that this is inside of.
_PATIENCE = 5.0


def joins(op: str | None) -> bool | None:
    """Return True if a session is attached to this thread from now on.

    Args:
        op: Type of the operator that the thread runs, or None if it calls a module.

    Returns:
        None if it must be asked again at the next operator: this one is not the program's.
    """
    if runs_backward() or reason_to_ignore((), {}) is not None:
        return None
    joined = join("pytorch", op)
    return joined or (None if op is None or not THREAD.control.enabled else False)


class ThreadState:
    """The state of the calling thread, to which another thread has access."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._own: dict[str, Any] = vars(STATE)
        self._native = None if native is None else native.this_thread()

    def is_here(self) -> bool:
        """Return True if this is the calling thread."""
        return self._thread == threading.get_ident()

    def leave(self, attachment: object) -> bool:
        """End the instrumentation of the thread by an attachment.

        Returns:
            False if another thread is inside an operator that does not end soon. It ignores further
            operators.
        """
        if self.is_here():
            STATE.attachment = None
            STATE.activations.clear()
            return True
        begin = time.monotonic()
        while not self._left(attachment):
            if time.monotonic() - begin > _PATIENCE:
                return False
            time.sleep(0.001)
        return True

    def _left(self, attachment: object) -> bool:
        if self._own.get("suspended"):
            return False  # The function-mode interceptor is inside an operator.
        if self._native is not None:
            return bool(native.leave_thread(self._native, attachment))
        if self._own["attachment"] is attachment:
            if self._own["opaque"]:
                return False
            self._own.update(attachment=None, activations=[])
        return True
