"""Host routines: Python functions that nodes of a graph call.

Owns the registration with TensorFlow's registry of Python functions, and what happens to an
exception on the executor's thread: the user's own is kept for the frame that started the run.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from amanda_core import Session
from amanda_driver_tf._insertion.nodes import Flat
from amanda_driver_tf._shared.state import STATE
from amanda_driver_tf._tensorflow_internals.modules import context, record, script_ops
from amanda_driver_tf._tensorflow_internals.objects import host_functions, put_host_function

__all__ = ["HostFunction", "Listener", "register"]

# Routines of one process run one after the other, as they do in eager mode: tools count and
# collect, and an executor calls from many threads.
_LOCK = threading.RLock()


class Listener:
    """Which session runs host functions now, and hears of what they raise.

    They outlive the session that wrote them: the same tools may be applied again. So does this,
    which is the same one for all sessions that resume one another.
    """

    def __init__(self) -> None:
        self._session: weakref.ref[Session] | None = None

    @classmethod
    def of(cls, session: Session) -> Listener:
        """The listener of a session."""
        return session.persistent("tensorflow.listener", cls)

    def listen(self, session: Session) -> None:
        """Let a session hear from now on."""
        self._session = weakref.ref(session)

    def hear(self, error: BaseException) -> None:
        """Tell the session of an exception."""
        session = self._session() if self._session is not None else None
        if session is not None:
            session.defer(error)


class HostFunction(script_ops.EagerFunc):  # type: ignore[misc]
    """What stands in TensorFlow's registry. Its own class keeps the tape and tensors for ever.

    Attributes:
        token: Under which it stands there.
        has_edited: Whether a call of it has returned anything but what it was given.
    """

    token: str
    has_edited = False

    def __init__(self, function: Flat, listener: Listener, dtypes: Sequence[int]) -> None:
        super().__init__(function, list(dtypes), is_grad_func=False)
        self._function, self._listener = function, listener

    def stand_as(self, token: str) -> None:
        """Stand in the registry under a token, in the place of who stood there."""
        self.token = token
        put_host_function(token, self)

    def __call__(self, device: Any, token: Any, args: Any) -> Any:
        STATE.quiet += 1
        try:
            with _LOCK, context.eager_mode(), record.stop_recording():
                given = list(args)
                returned = self._function(given)
                if any(new is not old for new, old in zip_longest(returned, given)) and returned:
                    self.has_edited = True
                return returned
        except BaseException as error:
            self._listener.hear(error)
            raise
        finally:
            STATE.quiet -= 1


def register(function: Flat, listener: Listener, dtypes: Sequence[int]) -> HostFunction:
    """Make a function callable from nodes.

    Returns:
        What must be kept alive for as long as a node with its token may run.
    """
    host = HostFunction(function, listener, dtypes)
    host.token = host_functions.insert(host)
    return host
