"""Tells hooks, which may outlive their session in a graph, whether it still exists.

Owns the warning about a backward pass that comes too late.
"""

from __future__ import annotations

import weakref

from amanda_core import Session
from amanda_core.warning_locations import warn

__all__ = ["Lifetime", "Token"]


class Lifetime:
    """Tells whether a session still exists, and outlives it."""

    __slots__ = ("_session", "_warned")

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)
        self._warned = False

    def active(self) -> bool:
        """Return True if routines may run now; warn once if `apply` has ended."""
        session = self._session()
        if session is None or session.closed:
            self.warn()
            return False
        return session.enabled

    def warn(self) -> None:
        """Warn once that routines do not run, since `apply` has ended."""
        if not self._warned:
            self._warned = True
            warn(
                "Backward ran after `apply` ended: edits made in the forward pass stay, "
                "backward routines do not run. Call backward inside `apply`."
            )


class Token:
    """Represents an object in the hooks of a graph, so that the object dies with the graph.

    Attributes:
        epoch: Epoch in which the graph was made; the last one if several graphs share the hook.
    """

    __slots__ = ("__weakref__", "epoch")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
