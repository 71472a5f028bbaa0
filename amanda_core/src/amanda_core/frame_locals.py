"""Reads a local variable of a running function and leaves no copy of the variables behind.

Drivers import it; the engine does not.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

__all__ = ["local_of"]

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
