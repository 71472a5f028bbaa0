"""Tracebacks without the frames of Amanda and of what frameworks put around a program's own code.

Owns which frames are folded. A frame that raises the exception itself is not, nor are those of
tools, nor those of an error of a driver, which its author needs.
"""

from __future__ import annotations

import dis
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import ModuleType, TracebackType

from amanda_core.plugins import discovery
from amanda_core.plugins.driver_failures import is_noted

__all__ = ["VARIABLE", "Folding", "folded_modules"]

#: Environment variable; ``full`` shows all frames.
VARIABLE = "AMANDA_TRACEBACK"


def folded_modules(*, wrappers: bool) -> tuple[str, ...]:
    """Return the modules and packages whose frames are folded; none if all frames are wanted.

    Args:
        wrappers: True for those that frameworks put around a program's own code, too. They are in
            a traceback of the plain program.
    """
    if os.environ.get(VARIABLE) == "full":
        return ()
    drivers = [driver for driver in discovery.drivers() if driver.loaded]
    around = [module for driver in drivers if wrappers for module in driver.info.wrappers]
    return ("amanda", "amanda_core", "pluggy", *map(_package_of, drivers), *around)


def _package_of(driver: discovery.Driver) -> str:
    """Return the package of a driver that is a module, or the module of one that is an object."""
    plugin = driver.plugin
    if isinstance(plugin, ModuleType):
        return plugin.__name__.rpartition(".")[0] or plugin.__name__
    return type(plugin).__module__


class Folding:
    """Folds the tracebacks of an exception, and of those that led to it.

    Args:
        error: The exception.
        modules: The modules and packages whose frames are folded.

    Attributes:
        left_out: Number of frames that are left out.
    """

    def __init__(self, error: BaseException, modules: Collection[str]) -> None:
        self._packages = frozenset(modules)
        self._errors = [one for one in _chain(error) if not is_noted(one)] if modules else []
        self.left_out = 0

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Leave the frames out until the block ends."""
        before = [error.__traceback__ for error in self._errors]
        try:
            self.apply()
            yield
        finally:
            for error, trace in zip(self._errors, before, strict=True):
                error.__traceback__ = trace

    def apply(self) -> None:
        """Leave the frames out from now on."""
        self.left_out = 0
        for error in self._errors:
            error.__traceback__ = self._folded(error.__traceback__)

    def _folded(self, trace: TracebackType | None) -> TracebackType | None:
        frames: list[TracebackType] = []
        while trace is not None:
            frames.append(trace)
            trace = trace.tb_next
        kept = [frame for frame in frames if not self._is_folded(frame)]
        if not kept:
            return frames[0] if frames else None  # Nothing of the program: all of it may matter.
        self.left_out += len(frames) - len(kept)
        found = None
        for frame in reversed(kept):
            # An asynchronous exception may arrive at an instruction of no line: -1 stands for that.
            line = -1 if frame.tb_lineno is None else frame.tb_lineno
            found = TracebackType(found, frame.tb_frame, frame.tb_lasti, line)
        return found

    def _is_folded(self, trace: TracebackType) -> bool:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        if self._packages.isdisjoint(_with_packages(name)):
            return False
        return trace.tb_next is not None or not _raises(trace)


def _with_packages(name: str) -> Iterator[str]:
    """Yield the names of a module and of the packages that it is in."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _raises(trace: TracebackType) -> bool:
    """Return True if a frame raises at its line itself, and does not call what raises in C."""
    code = trace.tb_frame.f_code.co_code
    return dis.opname[code[trace.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and all that are shown with it, each once."""
    left, seen = [error], set()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        left += [other for other in (one.__cause__, one.__context__) if other is not None]
        group = getattr(one, "exceptions", ())
        left += [other for other in group if isinstance(other, BaseException)]
