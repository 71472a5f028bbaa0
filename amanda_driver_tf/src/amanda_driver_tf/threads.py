"""The driver's state of each thread: which session instruments it, and what is to be ignored.

Owns the thread-local state that the interceptors of all modes share. It makes no decisions. It is
one object because the native interceptor reads it. Modes are known only by the protocols below.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

from amanda_core.driver_kit import Session, is_started_by_python, join

__all__ = [
    "STATE",
    "FunctionCalls",
    "Request",
    "SessionRuns",
    "call_quietly",
    "joins",
    "keep_thread",
    "quietly",
]

R = TypeVar("R")


class FunctionCalls(Protocol):
    """Instruments the functions that a thread calls."""

    session: Session

    def run(
        self, call: Callable[..., Any], name: bytes, inputs: list[Any], count: int, saved: Any
    ) -> Any:
        """Call a function or its twin, where `call` runs a function by its name."""


class Request(NamedTuple):
    """The arguments of a session's run, as outputs and ops of the C API.

    Attributes:
        feeds: What is fed, with its values if they are known already.
        fetches: The outputs that are fetched.
        targets: Further ops that run.
    """

    feeds: Any
    fetches: list[Any]
    targets: list[Any]


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
        #: Whether no session is attached, so that an op may attach one.
        self.unattached = True
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


def joins(op: str | None) -> bool:
    """Return True if an op has attached a session to this thread, to which none was.

    Args:
        op: Type of the op; None if it is not known yet.
    """
    # In threads that TensorFlow has started, ops belong to other ops.
    ready = STATE.unattached and not STATE.quiet and is_started_by_python()
    return ready and join("tensorflow", op)


def call_quietly(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Call `function` while operators, functions and graphs of this thread are ignored."""
    # Not a context manager, and not `finally`: an exception may arrive before they restore it.
    before = STATE.quiet
    try:
        STATE.quiet = before + 1
        result = function(*args, **kwargs)
        STATE.quiet = before
        return result
    except BaseException:
        STATE.quiet = before
        raise


@contextmanager
def quietly() -> Iterator[None]:
    """Ignore the operators, functions and graphs of this thread during this context."""
    before = STATE.quiet  # Interrupted, it is restored when the tools are removed.
    try:
        STATE.quiet = before + 1
        yield
    finally:
        STATE.quiet = before
