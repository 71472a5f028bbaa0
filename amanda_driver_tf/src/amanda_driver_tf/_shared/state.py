"""What the driver keeps for each thread: who watches it, and whether to look away.

Owns the thread-local state that the interceptors of all modes share; it decides nothing. It is one
object, as the native interceptor reads it. Of each mode it knows no more than how to call it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from amanda_core import Session

__all__ = ["STATE", "FunctionCalls", "SessionRuns", "quietly"]


class FunctionCalls(Protocol):
    """What instruments the functions that a thread calls."""

    session: Session

    def run(
        self, call: Callable[..., Any], name: bytes, inputs: list[Any], count: int, carried: Any
    ) -> Any:
        """Run a function, given what runs one of a name on inputs for a number of outputs."""


class SessionRuns(Protocol):
    """What instruments the graphs that sessions run in a thread."""

    session: Session

    def run(self, call: Any, owner: Any, request: Any) -> Any:
        """Run a session, given what runs fetches and targets."""

    def set_up(self, call: Any, owner: Any, request: Any) -> Any:
        """Set up a partial run, given what sets one up for fetches and targets."""

    def run_partially(self, call: Any, owner: Any, handle: Any, request: Any) -> Any:
        """Continue a partial run, given what continues it for fetches."""


class _State(threading.local):
    def __init__(self) -> None:
        #: What instruments the functions that this thread calls; None where nobody watches.
        self.functions: FunctionCalls | None = None
        #: What instruments the sessions that this thread runs, likewise.
        self.graphs: SessionRuns | None = None
        #: More than 0: what runs is none of the user's operators (the driver's own work).
        self.quiet = 0
        #: More than 0: inside a call of a function or a run of a graph; the outermost ends a step.
        self.running = 0
        #: Where eager ops of this thread run (a `Place`); None where nobody watches them.
        self.eager: Any = None
        #: Eager ops that were handed over to their fallback: type, frame, record, constants.
        self.handed: list[tuple[str, int, Any, tuple[bool, ...]]] = []
        #: Whether the tapes know of the eager op that has just run.
        self.told = False
        #: The first run of a recomputed function that has just ended.
        self.first_run: Any = None
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
