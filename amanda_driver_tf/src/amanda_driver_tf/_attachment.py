"""`TensorFlowAttachment`: this driver's hold on TensorFlow for one session.

Owns the modes (eager, functions, graphs), their start and their end. What is done to an operator
in a mode, the mode says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from amanda_core import Blind, Session
from amanda_driver_tf._eager.mode import EagerMode
from amanda_driver_tf._eager.replicas import refuse_in_replica
from amanda_driver_tf._facts import FACTS
from amanda_driver_tf._functions.mode import FunctionMode
from amanda_driver_tf._sessions.mode import GraphMode

__all__ = ["Mode", "TensorFlowAttachment"]


class Mode(Protocol):
    """One way in which TensorFlow executes, as far as this driver instruments it."""

    def start(self) -> None:
        """Start intercepting in this thread."""

    def stop(self) -> None:
        """Stop intercepting and restore what was found; harmless if not started."""

    def coverage(self) -> Sequence[Blind]:
        """Return what this mode cannot see, and why."""


class TensorFlowAttachment:
    """Instruments the operators of one thread, and what TensorFlow runs on its behalf.

    Args:
        session: The session whose tools instrument them.
    """

    facts = FACTS

    def __init__(self, session: Session) -> None:
        # The recorder of graphs stays where it is; what is taken back lies over it.
        self._modes: list[Mode] = [FunctionMode(session), GraphMode(session), EagerMode(session)]
        self._attached = False

    def attach(self) -> None:
        """Start intercepting in this thread.

        Raises:
            UnsupportedError: It is that of a replica, and watched already for the one that waits.
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

    def coverage(self) -> Sequence[Blind]:
        """Return what is not seen, and why."""
        return [
            *(blind for mode in self._modes for blind in mode.coverage()),
            Blind(
                "threads other than the one that entered `apply`, and those of its replicas",
                "they run vanilla",
            ),
        ]
