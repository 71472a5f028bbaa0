"""`TensorFlowAttachment`: attaches one session to TensorFlow.

Owns the start and end of the three modes (eager, functions, graphs). Each mode decides what happens
at an operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from amanda_core import CoverageGap, Session
from amanda_core.scopes import Labels
from amanda_driver_tf._eager.mode import EagerMode
from amanda_driver_tf._eager.replicas import refuse_in_replica
from amanda_driver_tf._eager.rules import handle_of, new_scopes, variables_of
from amanda_driver_tf._facts import FACTS
from amanda_driver_tf._functions.mode import FunctionMode
from amanda_driver_tf._sessions.mode import GraphMode
from amanda_driver_tf._shared.variables import Variables

__all__ = ["Mode", "TensorFlowAttachment"]


class Mode(Protocol):
    """One way in which TensorFlow executes operators, as instrumented by this driver."""

    def start(self) -> None:
        """Start intercepting in this thread."""

    def stop(self) -> None:
        """Stop intercepting and restore the original functions; does nothing if not started."""

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what this mode does not instrument, and why."""


class TensorFlowAttachment:
    """Instruments the operators of one thread, and what TensorFlow runs on its behalf.

    Args:
        session: The session whose tools instrument them.
    """

    facts = FACTS

    def __init__(self, session: Session) -> None:
        scopes = session.persistent("tensorflow.eager.scopes", new_scopes)
        session.persistent(
            "tensorflow.parameters",
            lambda: Variables(Labels(()), handle_of, lambda: variables_of(scopes.roots())),
        )
        # The recorder stays installed, so the modes' replacements must be put on top of it.
        self._modes: list[Mode] = [FunctionMode(session), GraphMode(session), EagerMode(session)]
        self._attached = False

    def attach(self) -> None:
        """Start intercepting in this thread.

        Raises:
            UnsupportedError: The thread runs a replica, so it is already instrumented for the
                thread that waits for it.
        """
        refuse_in_replica()
        self._attached = True
        for mode in self._modes:
            mode.start()

    def detach(self) -> None:
        """Stop intercepting and restore everything."""
        if not self._attached:
            return
        self._attached = False
        for mode in reversed(self._modes):
            mode.stop()

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what is not instrumented, and why."""
        return [
            *(gap for mode in self._modes for gap in mode.coverage()),
            CoverageGap(
                "threads other than the one that entered `apply`, and those of its replicas",
                "they run without tools",
            ),
        ]
