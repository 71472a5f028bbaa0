"""The state of one thread: the switches of the control API and the depth of routines.

Owns the thread-local state that both the activation of tools and the running of routines need.
Drivers may run routines on other threads. The flags of the session's thread hold there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from amanda_core.runtime.switches import CACHING, ENABLED, ROUTINE_DEPTH, new_switches

__all__ = [
    "THREAD",
    "Control",
    "MarkedZone",
    "WeakGroup",
    "inside_routine",
    "original",
    "standing_for",
]

T = TypeVar("T")


class WeakGroup(weakref.WeakSet[T]):
    """A set of weak references to which other threads may add while one goes over it."""

    def __iter__(self) -> Iterator[T]:
        references = list(self.data)  # type: ignore[attr-defined]  # No thread interrupts it.
        return iter([member for one in references if (member := one()) is not None])


class Control:
    """The switches of the control API (paper, listing 5) in one thread.

    Attributes:
        switches: The buffer that drivers read at every operator; see `switches`.
    """

    __slots__ = ("_entries", "autodiff", "listener", "original", "switches")

    def __init__(self) -> None:
        self.switches = new_switches()
        self.autodiff = False
        #: Called after each change of `enabled` and `caching`.
        self.listener: Callable[[], None] | None = None
        #: Inside a replacement, the op that it replaces, if the driver can run it.
        self.original: Callable[[Sequence[Any]], Any] | None = None
        #: Switch -> its nested values as (owner, value). The last one holds.
        self._entries: dict[str, list[tuple[object, bool]]] = {
            name: [(self, getattr(self, name))] for name in ("enabled", "caching", "autodiff")
        }

    @property
    def enabled(self) -> bool:
        """True if operators are instrumented."""
        return self.switches[ENABLED] != 0

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self.switches[ENABLED] = value

    @property
    def caching(self) -> bool:
        """True if analysis runs once for each operator."""
        return self.switches[CACHING] != 0

    @caching.setter
    def caching(self, value: bool) -> None:
        self.switches[CACHING] = value

    @property
    def routine_depth(self) -> int:
        """More than 0 while a routine of a tool runs in this thread."""
        return self.switches[ROUTINE_DEPTH]

    def enter(self, name: str, value: bool, owner: object) -> None:
        """Set a switch until `owner` leaves it."""
        self._entries[name].append((owner, value))
        self._set(name, value)

    def leave(self, name: str, owner: object) -> None:
        """Undo the last `enter` of `owner`, in whatever order others leave."""
        entries = self._entries[name]
        for index in [i for i, (one, _) in enumerate(entries) if one is owner][-1:]:
            del entries[index]
        self._set(name, entries[-1][1])

    def leave_all(self, is_left: Callable[[object], bool]) -> None:
        """Undo each `enter` of an owner for which `is_left` is true."""
        for name, entries in self._entries.items():
            for owner in [owner for owner, _ in entries if is_left(owner)]:
                self.leave(name, owner)

    def _set(self, name: str, value: bool) -> None:
        before = getattr(self, name)
        setattr(self, name, value)
        if value != before and name != "autodiff" and self.listener is not None:
            self.listener()


class MarkedZone:
    """A zone that the program has marked, while its thread is inside.

    Attributes:
        name: Its name.
        owner: Who leaves it.
        leaves: What ends it in the drivers.
    """

    __slots__ = ("leaves", "name", "owner")

    def __init__(self, name: str, owner: object) -> None:
        self.name, self.owner = name, owner
        self.leaves: list[Callable[[], None]] = []

    def leave(self, zones: list[MarkedZone]) -> None:
        """Remove it from the zones of its thread. It may be repeated."""
        for leave in self.leaves:
            leave()
        zones[:] = [zone for zone in zones if zone is not self]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.control = Control()
        #: The session of this thread, while tools are applied. The ground floor does not know its
        #: type.
        self.session: Any = None
        #: When drivers have last asked whether this thread is to be instrumented: see `join`.
        self.asked = 0
        #: The zones that the program has marked, outermost first.
        self.zones: list[MarkedZone] = []


THREAD = _Thread()


class inside_routine:
    """Mark this block as a routine: its operators are not instrumented, and `apply` is an error."""

    # Not a generator, which takes three times as long: it runs for every analysis.
    def __enter__(self) -> None:
        self._switches = THREAD.control.switches
        self._depth = self._switches[ROUTINE_DEPTH]
        self._switches[ROUTINE_DEPTH] = self._depth + 1

    def __exit__(self, *_: object) -> None:
        # Not one less: an exception may have kept an inner block from restoring it.
        self._switches[ROUTINE_DEPTH] = self._depth


@contextmanager
def standing_for(op: Callable[[Sequence[Any]], Any]) -> Iterator[None]:
    """Let `original` return `op` in this block, for drivers that can run a replaced op.

    Args:
        op: Runs the op on inputs by position.
    """
    control = THREAD.control
    before = control.original
    try:
        control.original = op
        yield
    finally:
        control.original = before


def original() -> Callable[[Sequence[Any]], Any] | None:
    """Return the op that the running replacement replaces, as a function of its inputs.

    Use it in a replacement that applies to some executions only. The function takes the inputs by
    position and returns the op's result, differentiated like the op. It can be kept and called
    later. Outside of a replacement, or if the driver cannot run the op, the result is None.
    """
    return THREAD.control.original
