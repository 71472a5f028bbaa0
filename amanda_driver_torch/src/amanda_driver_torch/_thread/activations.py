"""The modules that a thread is running, and how often each op was passed in a call of one.

Owns the records of these; which scope a module has, `_identity.scopes` says.
"""

from __future__ import annotations

from typing import Any

__all__ = ["OUTSIDE", "Activation", "Scope"]


class Scope:
    """One module as seen from its root; `number` tells scopes apart within this process."""

    __slots__ = ("number", "path", "root")

    def __init__(self, number: int, root: str, path: str) -> None:
        self.number, self.root, self.path = number, root, path


OUTSIDE = Scope(0, "", "")


class Activation:
    """One call of a module: its scope, and how often each site was passed during the call."""

    __slots__ = ("counts", "scope")

    def __init__(self, scope: Scope, counts: dict[Any, int] | None = None) -> None:
        self.scope = scope
        self.counts: dict[Any, int] = counts if counts is not None else {}

    def copy(self) -> Activation:
        """The activation as it stands, to be resumed by a recomputation."""
        return Activation(self.scope, dict(self.counts))
