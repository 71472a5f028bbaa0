"""How many functions in Python a program calls."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["python_calls"]


def python_calls(run: Callable[[], object]) -> int:
    """Return how many Python functions ran; a generator counts each time that it resumes."""
    found = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found
