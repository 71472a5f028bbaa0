"""`Mode`: what the instrumentation of functions and of sessions has in common.

Owns when a mode intercepts, and the coverage gaps found while rewriting.
"""

from __future__ import annotations

from amanda_core import Session
from amanda_core.patching import Patches
from amanda_driver_tf._graphs import recorder
from amanda_driver_tf._insertion.host_functions import Listener

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
        self._patches.acquire()
        self.is_started = True

    def stop(self) -> None:
        """Stop intercepting; does nothing if not started."""
        if self.is_started:
            self.is_started = False
            self._patches.release()
