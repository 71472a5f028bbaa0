"""`Mode`: what instrumenting functions and instrumenting sessions have in common.

Owns when a mode intercepts, and the names of what its translations do not see.
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
        patches: The replacements by which it is intercepted.
        name: Name of the mode.
    """

    def __init__(self, session: Session, patches: Patches, name: str) -> None:
        self.session = session
        self._patches = patches
        # What a translation or twin does not see is as true where it is used again.
        self._blind: dict[str, str] = session.persistent(f"tensorflow.blind.{name}", dict)
        self._listener = Listener.of(session)
        self.is_started = False

    def start(self) -> None:
        """Start intercepting."""
        recorder.install()
        self._patches.acquire()
        self.is_started = True

    def stop(self) -> None:
        """Stop intercepting."""
        if self.is_started:
            self.is_started = False
            self._patches.release()
