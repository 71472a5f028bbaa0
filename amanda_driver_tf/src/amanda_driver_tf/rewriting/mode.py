"""`Mode`: what the instrumentation of functions and of sessions has in common.

Owns when a mode intercepts, and the coverage gaps found while rewriting.
"""

from __future__ import annotations

from amanda_core.driver_kit import Patches, Session
from amanda_core.interface import CoverageGap
from amanda_driver_tf.graphs import recorder
from amanda_driver_tf.insertion.host_functions import Listener

__all__ = ["Mode"]


class Mode:
    """Instruments what one thread runs.

    Args:
        session: The session whose tools instrument it.
        patches: The replaced TensorFlow functions.
        name: Name of the mode.
    """

    def __init__(self, session: Session, patches: Patches, name: str) -> None:
        self.session = session
        self._patches = patches
        # Persistent, since the gaps of a twin or translation still exist when it is reused.
        self._gaps: dict[str, str] = session.persistent(f"tensorflow.coverage_gaps.{name}", dict)
        self._listener = Listener.of(session)
        self.is_started = False

    def start(self) -> None:
        """Start intercepting."""
        recorder.install()
        self.is_started = True
        self._patches.acquire(self)

    def enter_thread(self) -> None:
        """Intercept in this thread."""

    def stop(self, elsewhere: bool = False) -> None:
        """Stop intercepting; does nothing if not started."""
        if self.is_started:
            self._patches.release(self)
            self.is_started = False

    def add_gap(self, what: str, why: str) -> None:
        """Note what is not instrumented, and why."""
        self._gaps[what] = why
        self.session.note_inside(what, why)

    def gaps(self) -> list[CoverageGap]:
        """Return what was noted."""
        return [CoverageGap(what, why) for what, why in self._gaps.items()]
