"""`EagerMode`: the eager mode of one attachment.

Owns its start and its end; `identity.program` has the facts about the program.
"""

from __future__ import annotations

from collections.abc import Sequence

from amanda_core.driver_kit import Patches, Session
from amanda_core.interface import CoverageGap
from amanda_driver_tf.identity.places import Forward
from amanda_driver_tf.identity.program import EagerProgram
from amanda_driver_tf.threads import STATE

__all__ = ["EagerMode"]


class EagerMode:
    """Instruments the operators that one thread executes eagerly.

    Args:
        session: The session whose tools instrument them.
        patches: The functions of TensorFlow that pass operators on to it.
    """

    def __init__(self, session: Session, patches: Patches) -> None:
        self._patches = patches
        self._program = EagerProgram(session)
        self._started = False

    def start(self) -> None:
        """Start intercepting in this thread.

        Raises:
            UnsupportedError: TensorFlow is not as this mode expects.
        """
        self._started = True
        self._patches.acquire(self)
        self.enter_thread()

    def enter_thread(self) -> None:
        """Intercept in this thread."""
        STATE.eager = Forward(self._program)

    def stop(self, elsewhere: bool = False) -> None:
        """Stop intercepting and restore the original functions."""
        if not self._started:
            return
        if not elsewhere:
            STATE.fallbacks.clear()
            self._program.clear()
        self._patches.release(self)
        self._started = False

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what is not instrumented, and why."""
        return [
            CoverageGap(
                "tf.data pipelines, checkpoints, SavedModels", "they do not belong to the model"
            ),
            CoverageGap("the Python body of tf.py_function", "it is one op"),
            CoverageGap(
                "gradients of ops that ran outside `apply`",
                "their gradient functions run without tools",
            ),
            CoverageGap(
                "ops that a gradient function calls for some shapes only",
                "a gradient function without actions is not analysed again",
            ),
            *(CoverageGap(what, why) for what, why in self._program.unseen.items()),
        ]
