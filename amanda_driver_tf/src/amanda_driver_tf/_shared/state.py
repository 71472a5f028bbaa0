"""The driver's state of each thread: which session instruments it, and what is to be ignored.

Owns the thread-local state that the interceptors of all modes share. It makes no decisions. It is
one object because the native interceptor reads it. Modes are known only by the protocols below.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from amanda_core import Session

__all__ = ["STATE", "FunctionCalls", "SessionRuns", "keep_thread", "quietly"]


class FunctionCalls(Protocol):
    """Instruments the functions that a thread calls."""

    session: Session

    def run(
        self, call: Callable[..., Any], name: bytes, inputs: list[Any], count: int, saved: Any
    ) -> Any:
        """Call a function or its twin, where `call` runs a function by its name."""


class SessionRuns(Protocol):
    """Instruments the graphs that sessions run in a thread."""

    session: Session

    def run(self, call: Any, owner: Any, request: Any) -> Any:
        """Run a session, where `call` runs fetches and targets."""

    def set_up(self, call: Any, owner: Any, request: Any) -> Any:
        """Set up a partial run, where `call` sets one up for fetches and targets."""

    def run_partially(self, call: Any, owner: Any, handle: Any, request: Any) -> Any:
        """Continue a partial run, where `call` continues it for fetches."""


class _State(threading.local):
    def __init__(self) -> None:
        #: Instruments the functions that this thread calls; None if no tool is active.
        self.functions: FunctionCalls | None = None
        #: Instruments the sessions that this thread runs; None if no tool is active.
        self.graphs: SessionRuns | None = None
        #: More than 0 while the driver itself runs operators.
        self.quiet = 0
        #: More than 0 inside a function call or session run. The outermost one ends a step.
        self.running = 0
        #: Where eager ops of this thread run (a `Place`); None if no tool is active.
        self.eager: Any = None
        #: Eager ops that fell back to `execute.execute`: type, frame, record, constants.
        self.fallbacks: list[tuple[str, int, Any, tuple[bool, ...]]] = []
        #: Whether the last eager op was recorded on the tapes.
        self.is_recorded = False
        #: The first run of a recomputed function, if that ended last.
        self.first_run: Any = None
        #: Results of the last forward twin: (its outputs, the values saved for gradients).
        self.saved_results: Any = None
        #: Whether a forward accumulator tracks the function call that is being prepared.
        self.tangents = False
        #: Whether Python keeps this state between two calls from the thread; see `keep_thread`.
        self.is_kept = False
        #: The saved values of a call while its gradient is computed.
        self.passed_results: Any = None


STATE = _State()


def keep_thread() -> None:
    """Let Python keep its state of this thread for as long as the thread lives.

    For a call from a thread that TensorFlow has started, Python makes such a state, and everything
    that is local to a thread, and discards it with the call. That takes as long as a routine.
    """
    if not STATE.is_kept:
        STATE.is_kept = True
        if threading.get_ident() != threading.main_thread().ident:
            ctypes.pythonapi.PyGILState_Ensure()  # Without the release that would discard it.


@contextmanager
def quietly() -> Iterator[None]:
    """Ignore the operators, functions and graphs of this thread during this context."""
    STATE.quiet += 1
    try:
        yield
    finally:
        STATE.quiet -= 1
