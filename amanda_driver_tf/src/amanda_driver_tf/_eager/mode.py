"""`EagerMode`: the eager mode of one attachment.

Owns its start and its end. `intercept` calls it, and `program` has the facts about the program.
"""

from __future__ import annotations

from collections.abc import Sequence

from amanda_core import CoverageGap, Session
from amanda_driver_tf._eager.intercept import PATCHES
from amanda_driver_tf._eager.places import Forward
from amanda_driver_tf._eager.program import EagerProgram
from amanda_driver_tf._shared.state import STATE

__all__ = ["EagerMode"]


class EagerMode:
    """Instruments the operators that one thread executes eagerly.

    Args:
        session: The session whose tools instrument them.
    """

    def __init__(self, session: Session) -> None:
        self._program = EagerProgram(session)
        self._started = False

    def start(self) -> None:
        """Start intercepting in this thread.

        Raises:
            UnsupportedError: TensorFlow is not as this mode expects.
        """
        PATCHES.acquire()
        self._started = True
        STATE.eager = Forward(self._program)

    def stop(self) -> None:
        """Stop intercepting and restore the original functions."""
        if not self._started:
            return
        self._started = False
        STATE.eager = None
        STATE.fallbacks.clear()
        self._program.clear()
        PATCHES.release()

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
