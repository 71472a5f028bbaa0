"""Deferred exceptions: those that could not be raised where they occurred.

Owns how several of them become one. `Session` keeps them and knows when they are raised.
"""

from __future__ import annotations

from amanda_core.errors import annotate

__all__ = ["take"]


def take(pending: list[BaseException], error: BaseException) -> BaseException:
    """Empty `pending` into notes on `error`, and return it."""
    for other in pending:
        if other is not error:
            annotate(error, f"Then also {type(other).__name__}: {other}")
    pending.clear()
    return error
