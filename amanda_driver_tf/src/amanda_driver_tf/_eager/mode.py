"""`EagerMode`: the eager mode of one attachment.

Owns its start and its end. Who calls it is `intercept`; what is known of the program, `program`.
"""

from __future__ import annotations

from collections.abc import Sequence

from amanda_core import Blind, Session
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
            UnsupportedError: TensorFlow is not what this mode was written for.
        """
        PATCHES.acquire()
        self._started = True
        STATE.eager = Forward(self._program)

    def stop(self) -> None:
        """Stop intercepting and restore what was found."""
        if not self._started:
            return
        self._started = False
        STATE.eager = None
        STATE.handed.clear()
        self._program.clear()
        PATCHES.release()

    def coverage(self) -> Sequence[Blind]:
        """Return what is not seen, and why."""
        return [
            Blind("tf.data pipelines, checkpoints, SavedModels", "they are none of the model"),
            Blind("the Python body of tf.py_function", "it is one op"),
            Blind(
                "gradients of ops that ran outside `apply`",
                "their gradient functions run as without tools",
            ),
            Blind(
                "ops that a gradient function calls for some shapes only",
                "a gradient function that was found to need nothing is not looked into again",
            ),
            *(Blind(what, why) for what, why in self._program.unseen.items()),
        ]
