"""`Store`: keeps contexts and plans after a session, so that the same tools can resume.

Owns who holds contexts and for how long. It does not read them.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amanda_core.engine.context import OpContext
    from amanda_core.engine.session import Session
    from amanda_core.engine.tool import Tool

__all__ = ["Store"]

# How many stores one tool keeps for resuming. The oldest unused one is dropped first.
_STORES_KEPT = 4


#: What plans depend on: the serial and generation of each applied tool, and which conditions of its
#: selection hold in the step.
Stage = tuple[tuple[int, int, tuple[bool, ...]], ...]


class Store:
    """Keeps contexts and plans after a session, so that the same tools can resume.

    Only the newest tool holds it, since that tool is likely to be deleted first. It holds all of
    them: actions and plans do, and an action may also hold the contexts.

    Attributes:
        logs: Registrations of a tool -> {key of a context: {point: its actions}}.
        session: The session that uses it, or the last one that did. Contexts and plans find their
            session here, because they live longer than the session that made them.
    """

    __slots__ = (
        *("__weakref__", "contexts", "epochs", "ids", "keys", "logs", "persistent", "places"),
        *("session", "shared", "tools"),
    )

    session: Session  # Set by each session that uses the store.

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.tools = tuple(tools)
        #: Key of a context, which is its number in this store -> the context
        self.contexts: dict[int, OpContext] = {}
        self.keys = itertools.count()
        #: (is backward, id) -> the op that has it, for the ids that were read
        self.ids: dict[tuple[bool, int | None], object] = {}
        #: Namespace, is backward, key of the forward op's context and site key -> context
        self.places: dict[tuple[Hashable, ...], OpContext] = {}
        self.epochs: dict[Stage, int] = {}
        self.persistent: dict[str, Any] = {}
        #: The same for all threads under the same tools.
        self.shared: dict[str, Any] = {}
        self.logs: dict[Any, dict[Any, Any]] = {}

    @property
    def in_use(self) -> bool:
        """True if a session that is not closed uses it."""
        session = getattr(self, "session", None)
        return session is not None and not session.closed

    def log_of(self, tool: Tool) -> dict[Any, Any]:
        """Return the actions of a tool, to be changed."""
        log = self.logs.get(tool._amanda)
        if log is None:
            log = self.logs[tool._amanda] = {}
            tool._amanda.stores_with_actions.add(self)
        return log

    def suits(self, host: Store | None) -> bool:
        """Return True if a thread may resume it whose tools are those of `host`."""
        return not self.in_use and (host is None or self.shared is host.shared)

    @classmethod
    def resume(cls, tools: Sequence[Tool], host: Store | None = None) -> Store:
        """Return the store of an earlier session of exactly these tools, or a new one.

        Args:
            tools: The tools.
            host: The store of the thread that applied them, if that is another one.
        """
        if not tools:
            return cls(())
        stores = max((tool._amanda for tool in tools), key=lambda kept: kept.serial).stores
        names = tuple(id(tool) for tool in tools)
        # Each thread at a time has a store of its own.
        keys = ((number, *names) for number in itertools.count())
        key = next(key for key in keys if key not in stores or stores[key].suits(host))
        store: Store = stores.pop(key, None) or cls(tools)
        if host is not None:
            store.shared = host.shared
        stores[key] = store  # At the end: the most recently used.
        for old in list(itertools.islice(stores, max(0, len(stores) - _STORES_KEPT))):
            if not stores[old].in_use:
                del stores[old]
        return store
