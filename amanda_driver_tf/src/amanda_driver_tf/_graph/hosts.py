"""Host routines: Python functions that nodes of a graph call.

Owns the registration with TensorFlow's registry of Python functions, and what happens to an
exception on the executor's thread: the user's own is kept for the frame that started the run.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tensorflow.python.eager import context, record
from tensorflow.python.ops import script_ops

from amanda_core import Session
from amanda_driver_tf._graph.routines import Flat
from amanda_driver_tf._state import STATE

__all__ = ["register"]

# Routines of one process run one after the other, as they do in eager mode: tools count and
# collect, and an executor calls from many threads.
_LOCK = threading.RLock()


class _HostFunction(script_ops.EagerFunc):  # type: ignore[misc]
    """What stands in TensorFlow's registry. Its own class keeps the tape and tensors for ever."""

    def __init__(self, function: Flat, session: Session, dtypes: Sequence[int]) -> None:
        super().__init__(function, list(dtypes), is_grad_func=False)
        self._function, self._session = function, session

    def __call__(self, device: Any, token: Any, args: Any) -> Any:
        STATE.quiet += 1
        try:
            with _LOCK, context.eager_mode(), record.stop_recording():
                return self._function(list(args))
        except BaseException as error:
            self._session.defer(error)
            raise
        finally:
            STATE.quiet -= 1


def register(function: Flat, session: Session, dtypes: Sequence[int]) -> tuple[Any, str]:
    """Make a function callable from nodes.

    Returns:
        What must be kept alive for as long as the node may run, and the token for the node.
    """
    host = _HostFunction(function, session, dtypes)
    return host, script_ops._py_funcs.insert(host)
