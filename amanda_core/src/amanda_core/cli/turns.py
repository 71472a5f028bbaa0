"""Taking turns with the routines of tools, so that another thread can read what they keep."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from amanda_core.engine.stacks import ANALYSIS_TURN
from amanda_core.engine.tool import Tool, in_dependency_order

__all__ = ["held", "share"]


def share(tools: Iterable[Tool]) -> None:
    """Let the routines of each tool, and of those that it depends on, take turns from now on."""
    for tool in in_dependency_order(tools):
        tool._amanda.turn = tool._amanda.turn or threading.RLock()


@contextmanager
def held(tools: Iterable[Tool], patience: float) -> Iterator[bool]:
    """Keep the routines of tools from running in this block, except replacements.

    Args:
        tools: Tools that were given to `share`, and are applied to all threads.
        patience: Seconds to wait for routines that run now.

    Yields:
        False if they still run after that time.
    """
    end = time.monotonic() + patience
    turns: list[Any] = [ANALYSIS_TURN, *(one._amanda.turn for one in in_dependency_order(tools))]
    with ExitStack() as stack:
        taken = True
        for turn in turns:
            taken = taken and turn.acquire(timeout=max(0.0, end - time.monotonic()))
            if taken:
                stack.callback(turn.release)
        yield taken
