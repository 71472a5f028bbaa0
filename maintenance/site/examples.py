"""An extension of Griffe, which reads the docstrings: their examples become blocks of code.

The docstrings have examples as doctest finds them, without a heading, which Markdown would take for
quotations.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Examples", "fenced"]

_EXAMPLE = re.compile(r"^( *)(>>> .*(?:\n(?! *\n| *$).*)*)", re.MULTILINE)


def fenced(text: str) -> str:
    """Return a docstring with its examples as blocks of code.

    >>> print(fenced("Add.").strip())
    Add.
    """
    return _EXAMPLE.sub(lambda m: f"{m[1]}```pycon\n{m[1]}{m[2]}\n{m[1]}```", text)


class Examples(griffe.Extension):  # type: ignore[misc,unused-ignore]
    """Fences the examples of each object."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring of an object that was found."""
        if getattr(obj, "docstring", None) is not None:
            obj.docstring.value = fenced(obj.docstring.value)
