"""What the driver keeps for each thread: who watches it, and whether to look away.

Owns the thread-local state that the interceptors of all modes share; it decides nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amanda_driver_tf._attachment import TensorFlowAttachment
    from amanda_driver_tf._eager.places import Place
    from amanda_driver_tf._eager.recompute import FirstRun
    from amanda_driver_tf._eager.records import Record

__all__ = ["STATE", "quietly"]


class _State(threading.local):
    def __init__(self) -> None:
        #: The attachment whose session instruments this thread.
        self.attachment: TensorFlowAttachment | None = None
        #: More than 0: what runs is none of the user's operators (the driver's own work).
        self.quiet = 0
        #: More than 0: inside a call of a function or a run of a graph; the outermost ends a step.
        self.running = 0
        #: Where eager ops of this thread run; None where nobody watches them.
        self.eager: Place | None = None
        #: Eager ops that were handed over to their fallback: type, frame, record, constants.
        self.handed: list[tuple[str, int, Record, tuple[bool, ...]]] = []
        #: Whether the tapes know of the eager op that has just run.
        self.told = False
        #: The first run of a recomputed function that has just ended.
        self.first_run: FirstRun | None = None
        #: What the twin of a forward function returned for the gradients: (its outputs, the rest).
        self.carried: Any = None
        #: Whether a forward accumulator follows the call of a function that is being prepared.
        self.tangents = False
        #: That, while the gradient of the call is computed.
        self.arriving: Any = None


STATE = _State()


@contextmanager
def quietly() -> Iterator[None]:
    """Extent in which no operator, function or graph of this thread is seen."""
    STATE.quiet += 1
    try:
        yield
    finally:
        STATE.quiet -= 1
