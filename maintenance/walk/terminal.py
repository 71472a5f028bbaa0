"""A program on a terminal of some width, and what a person sees of it.

The program asks for lines with `PROMPT`, into which it writes the status of the last one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyte
from wcwidth import wcswidth

__all__ = ["PROMPT", "Screen", "Terminal"]

#: With the status before the dollar.
PROMPT = "walk:{}$ "
_PROMPT = re.compile(rb"walk:(\d+)\$ $")
_CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-Z\\-_=>])")
#: How lines of drawn tables begin.
_DRAWN = "┏┃┡│├└"


@dataclass(frozen=True, slots=True)
class Screen:
    """What a line that was typed did.

    Attributes:
        status: Its exit status.
        rows: All rows, also those that have scrolled out of sight.
        cut: What a reader does not see whole, or sees torn apart.
    """

    status: int
    rows: list[str]
    cut: list[str]


class Terminal:
    """A program on a pseudo-terminal of its own.

    Args:
        command: The program and its arguments.
        folder: Where it starts.
        environment: Its environment.
        columns: Width of the terminal.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], columns: int
    ) -> None:
        self.columns = columns
        self._process, self._file = pty.fork()
        if not self._process:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
            os.chdir(folder)
            os.execve(command[0], [*command], dict(environment))
        self._until_prompt(60)

    def type(self, line: str, seconds: float = 1200) -> Screen:
        """Type a line, wait until the next one can be typed, and return what is seen meanwhile.

        Raises:
            TimeoutError: The program does not ask for another line in this time.
        """
        os.write(self._file, line.encode() + b"\n")
        data = self._until_prompt(seconds)
        found = _PROMPT.search(data)
        assert found is not None
        # The terminal shows what is typed first, as a line of its own.
        text = data[: found.start()].decode(errors="replace").partition("\n")[2]
        return Screen(int(found[1]), self._rows(text), list(self._cut(text)))

    def close(self) -> None:
        """End the program."""
        os.close(self._file)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)

    def _until_prompt(self, seconds: float) -> bytes:
        data = b""
        end = time.monotonic() + seconds
        while not _PROMPT.search(data[-40:]):
            if not select.select([self._file], [], [], max(end - time.monotonic(), 0))[0]:
                raise TimeoutError(
                    f"No prompt after {seconds:.0f} s, but:\n{data.decode()[-2000:]}"
                )
            data += os.read(self._file, 100_000)
        return data

    def _rows(self, text: str) -> list[str]:
        screen = pyte.HistoryScreen(self.columns, 40, history=1_000_000)
        pyte.Stream(screen).feed(text)
        above = ["".join(line[x].data for x in range(self.columns)) for line in screen.history.top]
        rows = [row.rstrip() for row in [*above, *screen.display]]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def _cut(self, text: str) -> list[str]:
        found = []
        for line in _CONTROL.sub("", text).split("\n"):
            # A line of progress is drawn again and again, from its beginning.
            *overwritten, last = line.rstrip("\r").split("\r")
            if any(wcswidth(part) > self.columns for part in overwritten):
                found.append(f"progress is wider than the terminal: {line.strip()[:100]}")
            if last.lstrip()[:1] in tuple(_DRAWN) and wcswidth(last) > self.columns:
                found.append(f"a table is wider than the terminal: {last}")
            if "…" in last or re.fullmatch(r"  \w+  +\S.*\.\.\.", last):
                found.append(f"cut short: {last}")
        return found
