"""Reading files that come from outside: regular ones only, and no more of them than a limit."""

from __future__ import annotations

import stat
from pathlib import Path

__all__ = ["Unreadable", "read"]


class Unreadable(Exception):
    """A file is not there, is no regular file, or too large; the message says which."""


def read(path: Path, limit: int) -> bytes:
    """The content of a file.

    Args:
        path: The file.
        limit: Most bytes that it may have.

    Raises:
        Unreadable: It is not to be had.
    """
    try:
        # A pipe or a device would never end; opening one may wait for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise Unreadable("Not a file")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise Unreadable(f"Cannot be read: {error}") from error
    if len(content) > limit:
        raise Unreadable(f"Larger than {limit} bytes")
    return content
