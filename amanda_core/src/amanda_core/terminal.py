"""Text that comes from outside and is shown in a terminal.

Owns what of it is written as it is. What cannot be printed could move the cursor, or change the
direction of writing.
"""

from __future__ import annotations

import unicodedata

__all__ = ["printable"]


def printable(text: object) -> str:
    r"""Return text without characters that control a terminal or the direction of writing.

    >>> printable("a\x1b[31m")
    'a\\x1b[31m'
    """
    return "".join(
        letter
        if letter.isprintable() or unicodedata.category(letter) == "Zs"
        else letter.encode("unicode_escape").decode()
        for letter in str(text)
    )
