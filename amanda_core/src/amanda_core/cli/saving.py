"""`Saving`: results are written while a program runs, so that they survive the process.

Owns when, and what it may cost. A process that is killed or crashes leaves the last ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from amanda_core.cli import turns
from amanda_core.engine.activation import disabled
from amanda_core.engine.tool import Tool
from amanda_core.results import HasResult

__all__ = ["Saving", "results_so_far"]

#: Seconds before results are written first, and between two times at least.
_FIRST = 1.0
_INTERVAL = 5.0
#: Seconds that pass for each second that writing took: it has at most this part of the time.
_SHARE = 100.0


class Saving:
    """A thread that writes results now and then.

    Args:
        save: Writes them. It must not raise anything.
    """

    def __init__(self, save: Callable[[], object]) -> None:
        self._save = save
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="amanda-saving", daemon=True)

    def start(self) -> None:
        """Start the thread; the first results are written a second later."""
        self._thread.start()

    def stop(self, patience: float | None = None) -> bool:
        """Write nothing more.

        Args:
            patience: Seconds to wait for what is being written; None for as long as it takes.

        Returns:
            Whether nothing is being written now.
        """
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(patience)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = _FIRST
        with disabled():  # What tools compute for their results is not the program's.
            while not self._stopped.wait(pause):
                began = time.perf_counter()
                self._save()
                pause = max(_INTERVAL, _SHARE * (time.perf_counter() - began))


def results_so_far(tools: Mapping[str, Tool], patience: float) -> dict[str, str]:
    """Return the results of tools that can be read while they run, as JSON, by their names.

    Args:
        tools: The tools, whose routines take turns.
        patience: Seconds to wait for routines that run now. If they run longer, there are none.
    """
    found: dict[str, str] = {}
    with turns.held(tools.values(), patience) as held:
        for name, tool in tools.items() if held else ():
            if getattr(tool, "result_is_final", False):
                continue
            # What does not work in the middle of an iteration works at its end.
            with suppress(Exception):
                if isinstance(tool, HasResult) and callable(tool.result):
                    found[name] = tool.result().to_json()
    return found
