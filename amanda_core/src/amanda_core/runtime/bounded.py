"""Reading files from outside: only regular ones, and only up to a limit."""

from __future__ import annotations

import stat
from pathlib import Path

__all__ = ["Unreadable", "read"]


class Unreadable(Exception):
    """A file does not exist, is not a regular file, or is too large; the message says which."""


def read(path: Path, limit: int) -> bytes:
    """Read a regular file.

    Args:
        path: The file.
        limit: The maximum size in bytes.

    Raises:
        Unreadable: The file cannot be read or is too large.
    """
    try:
        # Reading a pipe or a device would never end, and opening one may block.
        if not stat.S_ISREG(path.stat().st_mode):
            raise Unreadable("Not a file")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise Unreadable(f"Cannot be read: {error}") from error
    if len(content) > limit:
        raise Unreadable(f"Larger than {limit} bytes")
    return content
