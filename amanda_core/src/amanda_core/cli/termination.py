"""`Termination`: the ways to end a process that unwind nothing: signals and `os._exit`.

Nothing in the program can catch them, so results are written in the handler and not after an
exception. A handler in Python does not run while the main thread waits in C++, such as in a
collective of which another process is missing. Then another thread does it, and the process ends
as it would without us.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn, Protocol

from amanda_core.engine.activation import disabled
from amanda_core.runtime.warning_locations import program_frame

__all__ = ["Ending", "Termination"]

#: Sent by schedulers, and when the terminal is closed. `nohup` has SIGHUP ignored.
_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
#: Seconds that the main thread has to handle a signal, before another thread does.
_GRACE = 0.5
#: Seconds in which another thread must have written results when the process is to end.
_PATIENCE = 20.0
#: What stops the thread that waits for signals. No signal has this number.
_STOP = b"\0"


class Ending(Protocol):
    """Writes the results of a process that ends."""

    def finish(self, problem: str, *, unwound: bool) -> object:
        """Write them. Only the first call does.

        Args:
            problem: How the process ends, if not well.
            unwound: Whether the main thread is where tools can be removed.
        """

    def interrupted(self, place: str) -> object:
        """Write those so far, and say where the main thread waits, which does not end by this."""


class Termination:
    """Handles the signals that the program has not taken over, and `os._exit`.

    Args:
        ending: Writes the results.
    """

    def __init__(self, ending: Ending) -> None:
        self._ending = ending
        self._finishing = False
        #: A signal that came while results were written.
        self._waiting: int | None = None
        #: Set once a handler has run in the main thread, or nothing is handled any more.
        self._handling = threading.Event()
        #: Where the main thread was when a signal came that it did not handle at once.
        self._place = ""
        self._process = os.getpid()
        self._wakeup: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._exit = os._exit

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Write results and end the process if a signal comes in this block."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        """Handle signals and `os._exit` from now on; called in the main thread."""
        # A fork of the program has no results, and ends by the signal as it would without us. The
        # signal waits meanwhile: the interpreter drops what arrives before a fork has settled.
        masks: list[set[signal.Signals | int]] = []

        def before() -> None:
            if self._ours():
                masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, self._ours()))

        def after(in_child: bool) -> None:
            if in_child:
                self.stop()
            if masks:
                signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=before,
                after_in_parent=lambda: after(False),
                after_in_child=lambda: after(True),
            )
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._handle)
        self._watch()
        plain = self._exit = os._exit

        @functools.wraps(plain)
        def leave(status: int) -> NoReturn:
            if os.getpid() == self._process:
                problem = f"ended with status {status} by os._exit" if status else ""
                unwound = threading.current_thread() is threading.main_thread()
                self._ending.finish(problem, unwound=unwound)
            plain(status)

        os._exit = leave

    def stop(self) -> None:
        """Handle nothing any more; called in the main thread."""
        for number in self._ours():
            signal.signal(number, signal.SIG_DFL)
        os._exit = self._exit
        # Below, the main thread waits for the other one, which must not take it for stuck.
        self._handling.set()
        if self._wakeup is None:
            return
        (reading, writing), self._wakeup = self._wakeup, None
        found = signal.set_wakeup_fd(-1)
        if found not in (-1, writing):  # The program has one of its own.
            signal.set_wakeup_fd(found)
        if os.getpid() == self._process and self._thread is not None:
            os.write(writing, _STOP)
            self._thread.join()
        os.close(reading)
        os.close(writing)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let a signal wait for the end of this block, in which results are written."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False
            if self._waiting is not None:
                _end(self._waiting)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._handling.set()
        if self._finishing:
            self._waiting = number
            return
        self._ending.finish(_ended(number, self._place or _place(frame)), unwound=True)
        _end(number)

    def _watch(self) -> None:
        """Start the thread that waits for signals which the main thread does not handle."""
        if threading.current_thread() is not threading.main_thread():
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        earlier = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if earlier != -1:  # Somebody else waits for signals.
            signal.set_wakeup_fd(earlier)
            os.close(reading)
            os.close(writing)
            return
        self._wakeup = reading, writing
        self._thread = threading.Thread(
            target=self._wait, args=[reading], name="amanda-signals", daemon=True
        )
        self._thread.start()

    def _wait(self, reading: int) -> None:
        with disabled():
            while (found := os.read(reading, 1)) not in (b"", _STOP):
                number = found[0]
                if number in (signal.SIGINT, *_SIGNALS):
                    self._received(number)

    def _received(self, number: int) -> None:
        """Do what the main thread does not do because it waits in C++."""
        before = _position()
        place = _place(_main_frame())
        if number != signal.SIGINT:
            # It may wait for a process that is ending, too, so that it is elsewhere soon.
            self._place = place
        if self._handling.wait(_GRACE) or _position() != before:
            return
        handler = signal.getsignal(number)
        if handler is signal.default_int_handler:
            # It would have raised. Of a handler of the program nobody knows whether it has run.
            self._ending.interrupted(f"waiting in {place}")
        if handler != self._handle:
            return
        # Results may need what the main thread holds, and the process must end all the same.
        writing = threading.Thread(target=self._finish, args=[_ended(number, place)])
        writing.daemon = True
        writing.start()
        writing.join(_PATIENCE)
        _end(number)

    def _finish(self, problem: str) -> None:
        with disabled():
            self._ending.finish(problem, unwound=False)

    def _ours(self) -> list[signal.Signals]:
        return [s for s in _SIGNALS if signal.getsignal(s) == self._handle]


def _ended(number: int, place: str) -> str:
    return f"ended by {signal.Signals(number).name} in {place}"


def _position() -> tuple[int, int]:
    """Return where the main thread is; the same while it waits in C++."""
    frame = _main_frame()
    return (id(frame), frame.f_lasti) if frame is not None else (0, 0)


def _place(frame: FrameType | None) -> str:
    """Describe where a thread is: the function in which it is, and the program's line."""
    if frame is None:
        return "a place that is not known"
    line = program_frame(frame)
    # A driver stands between what is called and who calls it.
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("amanda_"):
        frame = frame.f_back
    where = f"{os.path.basename(line.f_code.co_filename)}:{line.f_lineno}"
    return f"{frame.f_code.co_name} ({where})"


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _end(number: int) -> None:
    """End the process by a signal, in whatever thread."""
    with suppress(AttributeError, OSError, ValueError):  # The terminal may be gone.
        sys.stderr.flush()
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, signal.SIG_DFL)
    else:
        # The module `signal` refuses it here.
        import ctypes

        ctypes.pythonapi.PyOS_setsig.argtypes = [ctypes.c_int, ctypes.c_void_p]
        ctypes.pythonapi.PyOS_setsig(number, None)
    os.kill(os.getpid(), number)
