"""Remembering values without keeping them alive.

Owns every weak reference to a framework's value that the core, a driver or a tool holds. A
framework may refuse to exchange the content of a value that has weak references
(`torch.utils.swap_tensors`). A driver therefore recognises these references by their type, and
removes them when no tool is applied any more (`let_go`).
"""

from __future__ import annotations

import numbers
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from amanda_core.runtime.threads import WeakGroup

__all__ = [
    "Known",
    "Ref",
    "WeakValue",
    "Witness",
    "add_holder",
    "let_go",
    "only",
    "strongly",
    "weakly",
]

V = TypeVar("V")

#: Flag of types whose objects may refer to others (`Py_TPFLAGS_HAVE_GC`).
_TRACKED_BY_GC = 1 << 14
#: The most frequent types that refer to no other object, known without raising an error.
_ATOMS = frozenset({bool, bytes, complex, float, int, str, type(None)})

#: Returns what identifies a value without a reference to it: an object that lives about as long,
#: and facts about the value. None if there is no such object.
Witness = Callable[[Any], "tuple[object, object] | None"]


class Ref(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a value of a framework."""

    __slots__ = ()


class Holder(Protocol):
    """A holder of weak references, which must be gone when no tool is applied any more."""

    def let_go(self, kind: type, witness: Witness) -> None:
        """Remove the references to values of a type."""


_holders: WeakGroup[Holder] = WeakGroup()


def add_holder(holder: Holder) -> None:
    """Register a holder that `let_go` calls; it is itself held weakly."""
    _holders.add(holder)


def let_go(kind: type, witness: Witness) -> None:
    """Remove every weak reference to values of a type.

    `Known.get` still finds what is known of a value, as long as its witness is the same.

    Args:
        kind: The type.
        witness: Returns the witness of a value.
    """
    for holder in tuple(_holders):
        holder.let_go(kind, witness)


class _Entry(Ref):
    """A value of a table, and what is known of it."""

    __slots__ = ("key", "known")

    key: int
    known: Any


class _Released(NamedTuple):
    """What `Known` keeps about a value after `let_go`, with the witness that recognizes it."""

    known: Any
    witness: _Entry
    facts: tuple[object, Witness]


class Known(Generic[V]):
    """A table of facts about values, by identity. An entry is dropped when its value dies.

    Args:
        forgotten: Called with what was known of a value that has died; held weakly.
    """

    def __init__(self, forgotten: Callable[[V], object] | None = None) -> None:
        self._entries: dict[int, _Entry | _Released] = {}
        self._forgotten = None if forgotten is None else weakref.WeakMethod(forgotten)
        self._died = partial(_drop, weakref.ref(self))
        add_holder(self)

    def __len__(self) -> int:
        return len(self._entries)

    def __deepcopy__(self, memo: object) -> Known[V]:
        return Known()  # The copy of its owner has not seen any value.

    def get(self, value: Any) -> V | None:
        """Return what is known of a value; None if nothing is."""
        entry = self._entries.get(id(value))
        if entry is None:
            return None
        if isinstance(entry, _Entry):
            return entry.known if entry() is value else None
        facts, witness = entry.facts
        seen = witness(value)
        if seen is None or seen[0] is not entry.witness() or seen[1] != facts:
            self._drop(id(value))
            return None
        self.set(value, entry.known)
        return entry.known  # type: ignore[no-any-return]

    def set(self, value: Any, known: V) -> bool:
        """Set what is known of a value; return False if it cannot be referenced weakly."""
        try:
            entry = _Entry(value, self._died)
        except TypeError:
            return False
        entry.key, entry.known = id(value), known
        self._entries[entry.key] = entry
        return True

    def value(self, key: int) -> Any:
        """Return the value whose ``id()`` was `key` when it was set, None if it is gone."""
        entry = self._entries.get(key)
        return entry() if type(entry) is _Entry else None

    def items(self) -> Iterator[tuple[Any, V]]:
        """Yield the values that have a weak reference now, and what is known of each."""
        for entry in list(self._entries.values()):
            value = entry() if type(entry) is _Entry else None
            if value is not None:
                yield value, entry.known

    def pop(self, value: Any) -> None:
        """Forget a value."""
        self._entries.pop(id(value), None)

    def clear(self) -> None:
        """Forget all values."""
        self._entries.clear()

    def let_go(self, kind: type, witness: Witness) -> None:
        """Remove the references to values of a type; see the function of this name."""
        for key, entry in self._entries.copy().items():
            value = entry() if type(entry) is _Entry else None
            if not isinstance(value, kind):
                continue
            seen = witness(value)
            if seen is None:
                self._drop(key)
            else:
                own = _Entry(seen[0], self._died)
                own.key = key
                self._entries[key] = _Released(entry.known, own, (seen[1], witness))

    def _drop(self, key: int) -> None:
        known = self._entries.pop(key).known
        forgotten = self._forgotten() if self._forgotten is not None else None
        if forgotten is not None:
            forgotten(known)


def _drop(
    held: Callable[[], Known[Any] | None],
    dead: _Entry,
    ends: Callable[[], bool] = sys.is_finalizing,
) -> None:
    # At the end the interpreter takes the names of modules away, which tables need.
    if not ends() and (table := held()) is not None:
        entry = table._entries.get(dead.key)
        if entry is dead or getattr(entry, "witness", None) is dead:
            table._drop(dead.key)


class WeakValue(Ref):
    """A reference that `weakly` made, which cannot be mistaken for a remembered value.

    Native code of a driver may make it itself.
    """

    __slots__ = ()


def weakly(value: Any) -> Any:
    """Return a form of a value, or of the values in sequences, that keeps no value alive.

    The form is a weak reference, or the value itself if it refers to no other object, such as a
    number. Other values, such as dictionaries, become None: they may hold objects that the
    framework must free, now or later.
    """
    if type(value) in _ATOMS:
        return value
    if isinstance(value, (list, tuple)):
        return [weakly(item) for item in value]
    try:
        return WeakValue(value)
    except TypeError:
        return value if _refers_to_nothing(value) else None


def _refers_to_nothing(value: Any) -> bool:
    if isinstance(value, slice):
        return all(map(_refers_to_nothing, (value.start, value.stop, value.step)))
    if isinstance(value, (numbers.Number, str, bytes)):
        return True  # Also members of an enumeration.
    return not type(value).__flags__ & _TRACKED_BY_GC


def strongly(value: Any) -> Any:
    """Return the value that was passed to `weakly`, with None in place of values that have died."""
    if isinstance(value, list):
        return [strongly(item) for item in value]
    return value() if isinstance(value, WeakValue) else value


def only(remembered: Any, keep: Callable[[Any], Any]) -> Any:
    """Return what `weakly` returned, with `keep` applied to each single value."""
    if isinstance(remembered, list):
        return [only(item, keep) for item in remembered]
    return weakly(keep(strongly(remembered)))
