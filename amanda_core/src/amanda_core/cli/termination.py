"""`Termination`: the signals that end a process, after which its results are written.

By default such a signal unwinds nothing of the program, and nothing in it can catch it. So results
are written in the handler and not after an exception, and then the process ends by the signal.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

__all__ = ["Termination"]

#: Sent by schedulers, and when the terminal is closed. `nohup` has SIGHUP ignored.
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Termination:
    """Handles the signals that the program has not taken over.

    Args:
        finish: Writes the results. It is called at most once, and not interrupted by these signals.
    """

    def __init__(self, finish: Callable[[], object]) -> None:
        self._finish = finish
        self._finishing = False
        #: A signal that came while results were written.
        self._waiting: int | None = None

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Write results and end the process if a signal comes in this block."""
        # A fork of the program has no results, and ends by the signal as it would without us. The
        # signal waits meanwhile: the interpreter drops what arrives before a fork has settled.
        masks: list[set[signal.Signals | int]] = []

        def before() -> None:
            if self._ours():
                masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, self._ours()))

        def after(in_child: bool) -> None:
            if in_child:
                self._restore()
            if masks:
                signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

        free = [s for s in _SIGNALS if signal.getsignal(s) is signal.SIG_DFL]
        if not free:
            yield
            return
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=before,
                after_in_parent=lambda: after(False),
                after_in_child=lambda: after(True),
            )
        for number in free:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            self._restore()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let a signal wait for the end of this block, in which results are written."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False
            if self._waiting is not None:
                self._end(self._waiting)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._finishing:
            self._waiting = number
            return
        self._finish()
        self._end(number)

    def _end(self, number: int) -> None:
        signal.signal(number, signal.SIG_DFL)
        with suppress(AttributeError, OSError, ValueError):  # The terminal may be gone.
            sys.stderr.flush()
        os.kill(os.getpid(), number)

    def _ours(self) -> list[signal.Signals]:
        return [s for s in _SIGNALS if signal.getsignal(s) == self._handle]

    def _restore(self) -> None:
        for number in self._ours():
            signal.signal(number, signal.SIG_DFL)
