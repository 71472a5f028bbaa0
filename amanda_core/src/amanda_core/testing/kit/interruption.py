"""Exceptions that arrive at any line, such as Ctrl-C, alarms and those that other threads set.

Owns the counting of the lines that a function runs, and the exception at one of them. Tests use it
to show that entering, running and leaving `apply` can be interrupted anywhere.
"""

from __future__ import annotations

import dis
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Any

__all__ = ["count_lines", "distinct_lines", "interrupt"]

#: Parts of the names of files whose lines do not count: exceptions in callbacks of weak references
#: never reach a program, nor do all in constructors of named tuples that C++ calls for a key, and
#: reading metadata of packages takes most of the lines.
_SKIPPED = (
    "<string>",
    "email",
    "importlib",
    "pathlib",
    "weak.py",
    "weakref.py",
    "_weakrefset.py",
    "zipfile",
    "zipp",
    "typing.py",
)


def count_lines(program: Callable[[], object], leaving_out: Sequence[str] = ()) -> int:
    """Run `program` and return how many lines of Python run, but for those of its own file.

    Args:
        program: The function.
        leaving_out: Parts of the names of files whose lines do not count.
    """
    lines = _Lines(program, 0, KeyboardInterrupt, leaving_out)
    lines.run()
    return lines.count


def distinct_lines(program: Callable[[], object], leaving_out: Sequence[str] = ()) -> list[int]:
    """Run `program` and return when each line of a file runs first, counted as by `count_lines`.

    Args:
        program: The function.
        leaving_out: As for `count_lines`.
    """
    lines = _Lines(program, 0, KeyboardInterrupt, leaving_out)
    lines.run()
    return list(lines.first.values())


def interrupt(
    program: Callable[[], object],
    at: int,
    kind: type[BaseException] = KeyboardInterrupt,
    leaving_out: Sequence[str] = (),
    may_be_handled: bool = False,
) -> str:
    """Run `program` with an exception at one of its lines, and swallow that.

    Args:
        program: The function.
        at: Which line, counted from 1 as by `count_lines`, or the next one where an exception can
            arrive.
        kind: The class of the exception.
        leaving_out: As for `count_lines`.
        may_be_handled: Whether it may arrive where a framework goes on after any `Exception`, or
            after all others as well (``except:``).

    Returns:
        The line as ``file:number function``; an empty string if there are fewer lines.

    Raises:
        AssertionError: The exception did not leave `program`.
    """
    lines = _Lines(program, at, kind, leaving_out)
    handled = sys.exc_info()[1]
    raised = lines.run()
    assert sys.exc_info()[1] is handled, f"an exception is handled for ever after {lines.place}"
    if raised is not None and not lines.place:
        raise AssertionError("the program raised by itself") from raised
    # An exception in a driver's code that is not Ctrl-C becomes the cause of the driver's error. A
    # framework may raise another one in an `except` of its own.
    found = raised, getattr(raised, "__cause__", None), getattr(raised, "__context__", None)
    # A framework makes another one of what a callback raises, and quotes it.
    is_kind = kind in map(type, found) or "interrupted" in str(raised)
    if may_be_handled and not is_kind:
        # What a framework goes on with may be wrong, and raise an error of its own later.
        is_lost = raised is None and issubclass(kind, Exception)
        is_kind = is_lost or any(map(_handles_all, lines.codes))
    assert not lines.place or is_kind, f"{raised!r} after {lines.place}"
    return lines.place


class _Lines:
    def __init__(
        self,
        program: Callable[[], object],
        at: int,
        kind: type[BaseException],
        leaving_out: Sequence[str],
    ) -> None:
        self._program, self.at, self.kind, self.count, self.place = program, at, kind, 0, ""
        self.first: dict[tuple[str, int], int] = {}
        #: Functions of others that ran when the exception arrived, the innermost first.
        self.codes: list[CodeType] = []
        code = getattr(program, "__code__", None)
        own = (code.co_filename,) if code is not None else ()
        self._skipped = (*_SKIPPED, *own, *leaving_out)
        #: Name of a file -> whether its lines do not count.
        self._skips: dict[str, bool] = {}

    def run(self) -> BaseException | None:
        sys.settrace(self)
        try:
            self._program()
        except BaseException as error:
            error.__traceback__ = None  # Its frames would keep alive what the program made.
            return error
        finally:
            sys.settrace(None)
        return None

    def __call__(self, frame: FrameType, event: str, _: Any) -> _Lines | None:
        code = frame.f_code
        if event == "call":
            name = code.co_filename
            if (skips := self._skips.get(name)) is None:
                skips = self._skips[name] = any(part in name for part in self._skipped)
            return None if skips else self
        if event == "line":
            self.count += 1
            if not self.at:
                self.first.setdefault((code.co_filename, frame.f_lineno), self.count)
            elif self.count >= self.at and not _must_end(frame):
                sys.settrace(None)
                self.place = f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
                self.codes = self._others(frame)
                raise self.kind("interrupted")
        return self

    def _others(self, frame: FrameType | None) -> list[CodeType]:
        found = []
        while frame is not None and frame.f_code is not _Lines.run.__code__:
            if not _is_ours(frame):
                found.append(frame.f_code)
            frame = frame.f_back
        return found


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("amanda")


def _handles_all(code: CodeType) -> bool:
    """Return True if a function goes on after any exception."""
    try:
        return re.search(r"^\s*except:", inspect.getsource(code), re.MULTILINE) is not None
    except (OSError, TypeError):
        return False


#: Instructions that raise nothing: the start of `try`, and the start and end of what handles an
#: exception. After an exception at its end, Python would take the handled one for one that is still
#: being handled, and set it as the context of each later one.
_QUIET = {dis.opmap[name] for name in ("NOP", "PUSH_EXC_INFO", "POP_EXCEPT") if name in dis.opmap}
#: Instructions that keep a result on the stack, below the exit of a block that returns it.
_SWAPS = {dis.opmap[name] for name in ("SWAP", "ROT_TWO") if name in dis.opmap}


#: Files of Python where a function in Python releases a lock. After an exception there the lock is
#: held for ever, and other threads wait for it.
_LOCKING = (os.path.join("logging", "__init__.py"), "threading.py")
#: Methods that Python's own C code calls where an exception is lost (`__del__`), or leaves an
#: `OrderedDict` without a key that it lists.
_CALLED_BY_PYTHON = {"__del__", "__eq__", "__hash__"}


def _must_end(frame: FrameType) -> bool:
    """Return True at a line where an exception would be lost, or leave Python itself broken."""
    is_locking = frame.f_code.co_filename.endswith(_LOCKING)
    return is_locking or _is_safe(frame) or _is_called_by_python(frame) or _leaves_others(frame)


def _leaves_others(frame: FrameType) -> bool:
    """Return True where Python leaves a context manager that is a generator of somebody else.

    After an exception there, what the generator does at its end is not done, with or without tools.
    """
    code = frame.f_code
    if code.co_name != "__exit__" or not code.co_filename.endswith("contextlib.py"):
        return False
    generator = getattr(frame.f_locals.get("self"), "gen", None)
    inside = getattr(generator, "gi_frame", None)
    return inside is not None and not _is_ours(inside)


def _is_called_by_python(frame: FrameType | None) -> bool:
    """Return True inside a method that has to end."""
    while frame is not None and frame.f_code.co_name not in _CALLED_BY_PYTHON:
        frame = frame.f_back
    return frame is not None


def _is_safe(frame: FrameType) -> bool:
    """Return True at an event between the end of a block and its exit, which releases a lock.

    Python raises nothing there: an exception arrives before, or after the exit.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    if code[at] in _SWAPS:
        at += 2
    first, *others = (code[i : i + 2] for i in range(at, at + 6, 2))
    again = (first, bytes([dis.opmap["DUP_TOP"], 0])) if "DUP_TOP" in dis.opmap else (first,)
    # The arguments of the exit are None three times.
    is_exit = first[0] == dis.opmap["LOAD_CONST"] and all(one in again for one in others)
    return is_exit or first[0] in _QUIET
