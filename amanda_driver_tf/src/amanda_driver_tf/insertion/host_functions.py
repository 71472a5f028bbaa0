"""Host routines: Python functions that graph nodes call.

Owns their registration with TensorFlow's registry of Python functions, and their exceptions. An
exception on an executor's thread is kept, so that the frame that started the run can raise the
user's own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from amanda_core.driver_kit import Session
from amanda_driver_tf.insertion.nodes import Flat
from amanda_driver_tf.tensorflow_internals.modules import context, script_ops
from amanda_driver_tf.tensorflow_internals.objects import host_functions, put_host_function
from amanda_driver_tf.tensorflow_internals.tapes import (
    executes_eagerly,
    restart_tapes,
    stop_tapes,
    tapes_stopped,
)
from amanda_driver_tf.threads import STATE, keep_thread

__all__ = ["HostFunction", "Listener", "register"]

# An executor calls routines from many threads. They run one at a time, as in eager mode, since
# tools count and collect without locks of their own.
_LOCK = threading.RLock()


class Listener:
    """Forwards exceptions of host functions to the session that is running now.

    Host functions outlive the session that wrote them, because the same tools may be applied again.
    All sessions that resume one another therefore share one listener.
    """

    def __init__(self) -> None:
        self._session: weakref.ref[Session] | None = None

    @classmethod
    def of(cls, session: Session) -> Listener:
        """Return the listener of a session, made if there is none."""
        return session.persistent("tensorflow.listener", cls)

    def listen(self, session: Session) -> None:
        """Forward exceptions to `session` from now on."""
        self._session = weakref.ref(session)

    def hear(self, error: BaseException) -> None:
        """Defer an exception to the current session."""
        session = self._session() if self._session is not None else None
        if session is not None:
            session.defer(error)


class HostFunction(script_ops.EagerFunc):  # type: ignore[misc]
    """An entry in TensorFlow's registry of Python functions.

    TensorFlow's own class would keep tapes and tensors alive for ever.

    Attributes:
        token: Its key in the registry.
        has_edited: Whether any call returned something other than its arguments.
    """

    token: str
    has_edited = False

    def __init__(self, function: Flat, listener: Listener, dtypes: Sequence[int]) -> None:
        super().__init__(function, list(dtypes), is_grad_func=False)
        self._function, self._listener = function, listener

    def stand_as(self, token: str) -> None:
        """Take over the registry entry `token`."""
        self.token = token
        put_host_function(token, self)

    def __call__(self, device: Any, token: Any, args: Any) -> Any:
        """Call the function, as TensorFlow does from a node."""
        if not STATE.is_kept:
            keep_thread()
        if not executes_eagerly():
            with context.eager_mode():
                return self(device, token, args)
        quiet = STATE.quiet
        records = not tapes_stopped()
        try:
            STATE.quiet = quiet + 1
            if records:
                stop_tapes()
            with _LOCK:
                given = list(args)
                returned = self._function(given)
                if returned and any(new is not old for new, old in zip_longest(returned, given)):
                    self.has_edited = True
                return returned
        except BaseException as error:
            self._listener.hear(error)
            raise
        finally:
            if records:
                restart_tapes()
            STATE.quiet = quiet


def register(function: Flat, listener: Listener, dtypes: Sequence[int]) -> HostFunction:
    """Make a function callable from graph nodes.

    Returns:
        The entry, which must stay alive for as long as a node with its token may run.
    """
    host = HostFunction(function, listener, dtypes)
    host.token = host_functions.insert(host)
    return host
