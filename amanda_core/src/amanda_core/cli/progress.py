"""What a long run says of itself while it lasts.

How long a program will take is not known, so it says how many steps have ended, and when.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from amanda_core.tool import Tool

__all__ = ["Progress"]


class Progress(Tool):
    """Says at the end of a step, now and then, how many have ended.

    Args:
        say: Writes a line.
        interval: Seconds between two lines, and before the first.
        clock: Seconds since some point.
    """

    def __init__(
        self,
        say: Callable[[str], object],
        interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._say, self._interval, self._clock = say, interval, clock
        self._begin = self._said = clock()
        self.add_inst_for_step(end=self._ended)

    def _ended(self, step: int) -> None:
        now = self._clock()
        if now - self._said >= self._interval:
            self._said = now
            ended = f"{step + 1} step{'s' if step else ''}"
            self._say(f"{ended} in {now - self._begin:.0f} s")
