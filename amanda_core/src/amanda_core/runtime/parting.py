"""The end of communication between the processes of a program.

Owns what is to be done just before it. A driver says when it comes.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["before_parting", "part"]

_waiting: dict[object, Callable[[], object]] = {}


def before_parting(call: Callable[[], object]) -> Callable[[], object]:
    """Call a function just before this process can no longer communicate with the others.

    Returns:
        A function that takes this back.

    >>> take_back = before_parting(lambda: print("last words"))
    >>> part()
    last words
    >>> _ = take_back()
    >>> part()
    """
    key = object()
    _waiting[key] = call
    return lambda: _waiting.pop(key, None)


def part() -> None:
    """Call what waits for the end of communication."""
    for call in list(_waiting.values()):
        call()
