"""Compiled programs: cells in graph mode and functions of `mindspore.jit`, and how to run them as
Python instead.

Owns the two switches that this takes, which are the process's. With one of them alone, a gradient
function that was made in the other mode either stays compiled or calls itself without end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mindspore import GRAPH_MODE, PYNATIVE_MODE
from mindspore.context import _context

__all__ = ["SWITCHES", "function_of", "is_graph_mode"]

_VARIABLE = "MS_JIT"


def is_graph_mode() -> bool:
    """Return True if cells are compiled when they are called."""
    return bool(_context().get_mode() == GRAPH_MODE) and os.environ.get(_VARIABLE) != "0"


def function_of(executor: Any) -> Callable[..., Any]:
    """Return the function that an executor of compiled programs compiles."""
    return executor.fn  # type: ignore[no-any-return]


class _Switches:
    """The switches. While several threads run programs as Python, they are set once."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._mode: int = PYNATIVE_MODE
        self._variable: str | None = None

    @contextmanager
    def as_python(self) -> Iterator[None]:
        """Let programs run as Python inside `with`."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def as_found(self) -> Iterator[None]:
        """Let programs run as without tools inside `with`, inside `as_python`."""
        if not self._users:
            yield
            return
        self._leave()
        try:
            yield
        finally:
            self._enter()

    def _enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._mode, self._variable = _context().get_mode(), os.environ.get(_VARIABLE)
                os.environ[_VARIABLE] = "0"
                _set_mode(PYNATIVE_MODE)

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                _set_mode(self._mode)
                if self._variable is None:
                    os.environ.pop(_VARIABLE, None)
                else:
                    os.environ[_VARIABLE] = self._variable


def _set_mode(mode: int) -> None:
    context = _context()
    if context.get_mode() != mode:
        context.set_mode(mode)
        context._context_switches.pop()  # Each switch is kept there for `mindspore.parallel`.


SWITCHES = _Switches()
