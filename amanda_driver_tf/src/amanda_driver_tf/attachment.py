"""`TensorFlowAttachment`: attaches one session to TensorFlow.

Owns the start and end of the three modes (eager, functions, graphs). Each mode decides what happens
at an operator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from amanda_core.driver_kit import Labels, Session, enter_zone
from amanda_core.interface import CoverageGap
from amanda_driver_tf.execution.eager.mode import EagerMode
from amanda_driver_tf.execution.functions.mode import FunctionMode
from amanda_driver_tf.execution.sessions.mode import GraphMode
from amanda_driver_tf.facts import FACTS
from amanda_driver_tf.identity.places import Forward
from amanda_driver_tf.identity.rules import handle_of, new_scopes, variables_of
from amanda_driver_tf.identity.variables import Variables
from amanda_driver_tf.identity.zones import mark_nodes
from amanda_driver_tf.interception import eager_operators, function_calls, session_runs
from amanda_driver_tf.interception.replicas import refuse_in_replica
from amanda_driver_tf.tensorflow_internals.tapes import restart_tapes, tapes_stopped
from amanda_driver_tf.threads import STATE

__all__ = ["Mode", "TensorFlowAttachment"]


class Mode(Protocol):
    """One way in which TensorFlow executes operators, as instrumented by this driver."""

    def start(self) -> None:
        """Start intercepting in this thread."""

    def enter_thread(self) -> None:
        """Intercept in this thread, after another one, which has ended."""

    def stop(self, elsewhere: bool = False) -> None:
        """Stop intercepting and restore the original functions; does nothing if not started.

        Args:
            elsewhere: Whether it intercepts in another thread, which may be inside an op.
        """

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what this mode does not instrument, and why."""


class TensorFlowAttachment:
    """Instruments the operators of one thread, and what TensorFlow runs on its behalf.

    Args:
        session: The session whose tools instrument them.
    """

    facts = FACTS

    def __init__(self, session: Session) -> None:
        self._session = session
        self._scopes = scopes = session.shared("tensorflow.eager.scopes", new_scopes)
        session.shared(
            "tensorflow.parameters",
            lambda: Variables(
                Labels(),
                handle_of,
                lambda: variables_of(scopes.roots()),
                scopes.classes,
                lambda path: scopes.class_at(path.partition("/")[0], path),
            ),
        )
        # The recorder stays installed, so the modes' replacements must be put on top of it.
        self._modes: list[Mode] = [
            FunctionMode(session, function_calls.PATCHES),
            GraphMode(session, session_runs.PATCHES),
            EagerMode(session, eager_operators.PATCHES),
        ]
        self._attached = False

    def attach(self) -> None:
        """Start intercepting in this thread.

        Raises:
            UnsupportedError: The thread runs a replica, so it is already instrumented for the
                thread that waits for it.
        """
        refuse_in_replica()
        self._enter()
        self._attached = True
        self._session.at_close(self.detach)
        for mode in self._modes:
            mode.start()

    def enter_thread(self) -> None:
        """Intercept in this thread, after another one, which has ended."""
        self._enter()
        for mode in self._modes:
            mode.enter_thread()

    def ask(self) -> None:
        """Do nothing: each operator of a thread without an attachment calls `join` anyway."""

    def _enter(self) -> None:
        self._thread, self._state = threading.get_ident(), vars(STATE)
        self._before = STATE.quiet, STATE.running, tapes_stopped()
        STATE.unattached = False

    def detach(self) -> None:
        """Stop intercepting and restore everything."""
        if not self._attached:
            return
        elsewhere = self._thread != threading.get_ident()
        self._state.update(eager=None, functions=None, graphs=None, unattached=True)
        if not elsewhere:  # An exception may have kept a call from restoring them.
            STATE.quiet, STATE.running, stopped = self._before
            if not stopped:
                restart_tapes()
        for mode in reversed(self._modes):
            mode.stop(elsewhere)
        self._attached = False

    def enter_zone(self, zone: str) -> Callable[[], None]:
        """Let operators that run here, or are traced, belong to a zone; return what ends this."""
        place = STATE.eager
        activations = place.activations if isinstance(place, Forward) else []
        traced, leave = mark_nodes(zone), enter_zone(zone, self._scopes, activations)

        def leave_both() -> None:
            leave()
            traced()

        return leave_both

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what is not instrumented, and why."""
        return [
            *(gap for mode in self._modes for gap in mode.coverage()),
            *self._other_threads(),
        ]

    def _other_threads(self) -> list[CoverageGap]:
        if self._session.turn is not None:
            return [CoverageGap("Python that TensorFlow's own threads call", "it belongs to ops")]
        what = "threads other than the one that entered `apply`, and those of its replicas"
        return [CoverageGap(what, 'they run without tools; threads="all" instruments them')]
