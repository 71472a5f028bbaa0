"""Reads a local variable of a running function and leaves no copy of the variables behind.

Owns also the search for the objects whose methods run. Drivers import it; the engine does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

__all__ = ["is_method", "local_of", "methods_around"]

#: References to a dictionary that only a frame holds: the frame's, a variable, and an argument.
_FRAMES_OWN = 3


def local_of(frame: FrameType, name: str) -> Any:
    """Return a local variable of a running function, or None if it has none of that name.

    Before Python 3.13 a frame keeps the copy that ``f_locals`` makes, and with it all values, until
    the function returns. The copy is emptied here, unless the program holds it itself.
    """
    values = frame.f_locals
    found = values.get(name)
    if type(values) is dict and sys.getrefcount(values) <= _FRAMES_OWN:
        values.clear()
    return found


def methods_around(
    frame: FrameType | None, counts: Callable[[CodeType], bool] = lambda code: True
) -> Iterator[tuple[Any, FrameType]]:
    """Yield the objects whose methods run, innermost first, each with the frame of its method.

    An object may be anything, so nothing but its type should be read before that is known.

    Args:
        frame: The frame at which the search begins.
        counts: Returns False for code that is not looked at.
    """
    while frame is not None:
        code = frame.f_code
        # Before Python 3.13 reading would write into the dictionary that `locals()` returned.
        if (
            is_method(code)
            and "locals" not in code.co_names
            and counts(code)
            and (owner := local_of(frame, code.co_varnames[0])) is not None
        ):
            yield owner, frame
        frame = frame.f_back


def is_method(code: CodeType) -> bool:
    """Return True if the first argument of a function may be the object whose method it is."""
    if not code.co_argcount:
        return False
    around = getattr(code, "co_qualname", "").rpartition(".")[0]
    return bool(around and not around.endswith("<locals>")) or code.co_varnames[0] == "self"
