"""Progress messages of a long run.

The total time of a program is not known, so the messages say how much has been done and since when.
Each is a line of its own, because the program may print lines in between.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from amanda_core.engine.context import OpContext
from amanda_core.engine.tool import Tool
from amanda_core.interface.namespace import matches

__all__ = ["FIRST", "Progress", "interval_for", "told_if_slow"]

#: Seconds between two lines on a terminal, and in a file.
_ON_TERMINAL = 10.0
_IN_LOGS = 60.0
#: Seconds before the first line on a terminal, and before something else is said to take long.
FIRST = 2.0
#: Factor between the numbers of operators that ran before two counted ones.
_APART = 4


def interval_for(stream: IO[str] | None) -> float:
    """Return the seconds between two lines that are written to `stream`."""
    try:
        return _ON_TERMINAL if stream is not None and stream.isatty() else _IN_LOGS
    except (AttributeError, ValueError):  # The stream is the program's own object, or closed.
        return _IN_LOGS


@contextmanager
def told_if_slow(say: Callable[[str], object], what: str) -> Iterator[None]:
    """Say what runs in this block if it takes long."""
    timer = threading.Timer(FIRST, say, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Progress(Tool):
    """Reports how many steps have ended, or how often operators ran if no step has ended.

    Without steps, as in inference, it counts the executions of a few operators: the first, the
    fourth, the sixteenth and so on. If a loop has three times as many operators as ran before it,
    one of them is counted. Executions of the other operators cost nothing.

    Args:
        say: Writes a line.
        interval: Seconds between two lines.
        first: Seconds before the first line; as many as between two if left out.
        clock: Seconds since some point.
    """

    changes_values = False

    def __init__(
        self,
        say: Callable[[str], object],
        interval: float = _ON_TERMINAL,
        first: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._say, self._interval, self._clock = say, interval, clock
        self._begin = self._said = clock()
        self._said -= 0 if first is None else interval - first
        self._ended = self._told = 0
        #: Number of operators so far, and number of the next one to be counted.
        self._met, self._next = 0, 1
        self._counted: list[_Counted] = []
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_step(end=self.end_step)

    def analyse(self, context: OpContext) -> None:
        """Count executions of operators 1, 4, 16, ... of the model."""
        # Routines are expensive in graphs, whose runs are steps anyway.
        if context.zone != "model" or not matches("*/*/eager", context.namespace):
            return
        self._met += 1
        if self._met == self._next:
            self._next *= _APART
            self._counted.append(_Counted(context.name))
            context.insert_before_op(self.count, inputs=[], op=self._counted[-1], observe=True)

    def count(self, op: _Counted) -> None:
        """Count one execution."""
        op.executions += 1
        now = self._clock()
        # If steps end, they are reported instead.
        if now - self._said >= self._interval and self._ended == self._told:
            most = max(self._counted, key=lambda one: one.executions)
            # Until something runs again there may be steps, of which none has ended.
            if most.executions > 1:
                self._tell(f"{most.name} ran {most.executions:,} times", now)

    def end_step(self, step: int) -> None:
        """Count the end of a step."""
        self._ended = step + 1
        now = self._clock()
        if now - self._said >= self._interval:
            self._tell(f"{self._ended:,} step{'s' if step else ''}", now)

    def _tell(self, what: str, now: float) -> None:
        self._said, self._told = now, self._ended
        self._say(f"{what} in {now - self._begin:.0f} s")


class _Counted:
    """An operator whose executions are counted."""

    def __init__(self, name: str) -> None:
        self.name, self.executions = name, 0
