"""Showing text from outside in a terminal.

Owns which characters are shown unchanged. Others could move the cursor or change the direction of
writing.
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
