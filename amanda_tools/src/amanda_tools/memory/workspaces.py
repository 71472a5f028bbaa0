"""Memory that PyTorch's operators allocate and free again while they run: their workspaces.

PyTorch reports each allocation to the profiler of the thread that makes it. Its profiler of single
threads costs a few microseconds, so it is started for one operator and stopped after it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

__all__ = ["Meter"]


class Meter:
    """Measures the most memory that an operator had allocated at one time, over what it began with.

    An operator that runs inside of another is part of that one. One that raises does not end: it
    is given up when the next one begins, or by `close`.

    >>> Meter().end("relu") is None
    True
    """

    def __init__(self) -> None:
        self._open = _Open()

    def begin(self, op: object, is_backward: bool = False) -> bool | None:
        """Start to measure an operator of this thread.

        Returns:
            True if it is measured; False if PyTorch cannot, or the program profiles itself. None if
            it is part of another one that is being measured.
        """
        start, _, is_on = _profiler()
        known, place = self._open, _place()
        if known.op is not None:
            if known.op is not op and known.place in place:
                return None
            if is_backward:
                # The engine keeps the state of the thread that calls it, and sets it at its end.
                return False
            self.close()
        if start is None or is_on():
            return False
        known.op, known.place = op, place[0]
        start()
        return True

    def end(self, op: object) -> int | None:
        """Return the bytes of an operator that ends; None if it was not measured."""
        if self._open.op is not op:
            return None
        left = most = 0
        for events in self.close():
            for event in events:
                if event.kind() == "memory_alloc":
                    left += event.cpu_memory_usage() + event.cuda_memory_usage()
                    most = max(most, left)
        return most

    def close(self) -> Any:
        """Stop to measure in this thread, and return the events by threads."""
        is_measuring, self._open.op = self._open.op is not None, None
        # An exception that leaves the backward pass has ended it.
        return _profiler()[1]() if is_measuring and _profiler()[2]() else ()


class _Open(threading.local):
    #: The operator that is being measured in a thread, and where the program called it.
    op: object = None
    place: tuple[int, int] = (0, 0)


def _place() -> list[tuple[int, int]]:
    """Return the frames of the program, the innermost first, and the instruction of each."""
    frame: FrameType | None = sys._getframe(1)
    found: list[tuple[int, int]] = []
    while frame is not None:
        if found or not frame.f_globals.get("__name__", "").startswith("amanda_"):
            found.append((id(frame), frame.f_lasti))
        frame = frame.f_back
    return found or [(0, 0)]


@cache
def _profiler() -> tuple[Any, Callable[[], Any], Callable[[], bool]]:
    """Return what starts and stops the profiler of a thread, and tells if there is one."""
    try:
        import torch
        from torch._C._profiler import _ExperimentalConfig

        autograd: Any = torch.autograd
        enable, disable = autograd._enable_profiler_legacy, autograd._disable_profiler_legacy
        # Without shapes, with memory, and without stacks, FLOPs and modules.
        config = autograd.ProfilerConfig(
            autograd.ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()
        )
        return lambda: enable(config), disable, autograd._profiler_enabled
    except (ImportError, AttributeError, TypeError):
        return None, lambda: (), lambda: False
