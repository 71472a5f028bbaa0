"""`Group`: processes that decide together what they do with one model.

Owns the agreement of their values. Drivers implement the two ways of communicating; the base class
is a process alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

from amanda_core.errors import UnsupportedError

__all__ = ["Group", "How"]

#: How values of several processes become one.
How = Literal["sum", "max", "min"]


class Group:
    """The processes that train one model, each with data of its own; by default this one alone.

    Tools ask `Facts.group` for it. A driver of a framework with several processes overrides `size`,
    `exchange` and `reduce`.

    Attributes:
        size: How many processes there are.
        rank: Which of them this one is, from 0.
    """

    size, rank = 1, 0

    def exchange(self, text: str) -> list[str]:
        """Return a short text of each process, when all have given one.

        Raises:
            UnsupportedError: A process did not come.
        """
        return [text]

    def reduce(self, values: Any, how: How) -> Any:
        """Return an array with the elements of all processes combined."""
        return values

    def agree(self, what: str, values: Mapping[str, Any], how: How = "sum") -> dict[str, Any]:
        """Return arrays in which the elements of all processes are combined.

        It communicates: each process calls it at the same place. One that is elsewhere, or has
        other arrays, makes it an error in all of them, before any array is sent.

        Args:
            what: What is decided, for the error.
            values: The arrays by name.
            how: How elements of one place are combined.

        Raises:
            UnsupportedError: The processes do not take part alike.
        """
        kinds = repr([(how, name, one.shape, str(one.dtype)) for name, one in values.items()])
        digest = hashlib.sha256(kinds.encode()).hexdigest()[:16]
        found = self.exchange(f"{what}, {len(values)} arrays, {digest}")
        if len({*found}) > 1:
            others = "; ".join(f"process {n}: {text}" for n, text in enumerate(found))
            raise UnsupportedError(f"Processes of one model decide differently: {others}")
        return {name: self.reduce(one, how) for name, one in values.items()}
