"""Ledger of live buffers: births, deaths, the peak, and who owns what at the peak.

A weak reference may report a death at any moment, so deaths are only queued and are settled before
the next change.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from amanda_core.interface.facts import Storage

__all__ = ["Ledger"]


@dataclass(slots=True)
class _Entry:
    owner: int | None
    size: int
    kind: str
    holders: int = 0


class _Holder(weakref.ref[Any]):
    """A weak reference to what holds a buffer: one object, as there is one for each tensor."""

    __slots__ = ("dead", "key", "number")
    dead: deque[tuple[int, int]]
    key: object
    number: int


def _died(holder: Any) -> None:
    holder.dead.append((holder.number, time.perf_counter_ns()))


class Ledger:
    """Live buffers by owner. An owner is a number; None owns the buffers that existed before.

    Attributes:
        live: Bytes of live buffers with an owner.
        given: Bytes of live buffers that existed before.
        peak: Maximum of `live`.
        peak_owner: Owner of the buffer whose birth caused the peak.
        by_owner: Owner -> bytes of its live buffers.
        by_kind: Kind of a buffer, such as weights -> bytes of live buffers.
        changed: Called at each change with the time, the buffer's owner, and the bytes, which are
            negative for a death.
    """

    def __init__(self, changed: Callable[[int, int | None, int], None]) -> None:
        self.live = self.given = self.peak = self.given_peak = 0
        self.peak_owner: int | None = None
        self.by_owner: Counter[int | None] = Counter()
        self.by_kind: Counter[str] = Counter()
        self.changed = changed
        self._entries: dict[object, _Entry] = {}
        self._holders: dict[int, _Holder] = {}
        self._dead: deque[tuple[int, int]] = deque()
        self._at_peak: dict[int | None, int] = {}
        self._kinds_at_peak: dict[str, int] = {}
        self._peak_is_new = False

    def meet(self, buffer: Storage, owner: int | None, now: int, kind: str = "") -> int:
        """Record a buffer, and its owner if it is new.

        The kind of a buffer that existed before is the first one that is not empty.

        Returns:
            Number of bytes allocated: the size of a new buffer, or the growth of a known one.
        """
        if self._dead:
            self.settle()
        entry = self._entries.get(buffer.key)
        new = entry is None
        if entry is None:
            entry = self._entries[buffer.key] = _Entry(owner, 0, kind)
        elif owner is None and entry.owner is None and kind and not entry.kind:
            self.by_kind[""] -= entry.size
            self.by_kind[kind] += entry.size
            entry.kind = kind
        known = self._holders.get(id(buffer.holder))
        if known is None or known.key != buffer.key:
            self._hold(buffer, entry, now)
        more = buffer.nbytes - entry.size
        if not more:
            return 0
        if more < 0:
            self._before_less()
        entry.size = buffer.nbytes
        self._add(entry, more)
        if self.live > self.peak:
            self.peak, self.peak_owner, self._peak_is_new = self.live, owner, True
        self.changed(now, entry.owner, more)
        # Growth of a buffer that existed before was caused by the operator that wrote it.
        return more if new or more > 0 else 0

    def owner_of(self, key: Hashable) -> int | None:
        """Return who allocated a live buffer; None if it existed before or is not known."""
        self.settle()
        entry = self._entries.get(key)
        return None if entry is None else entry.owner

    def settle(self) -> None:
        """Remove the buffers that have died."""
        while self._dead:
            holder, when = self._dead.popleft()
            self._release(self._holders.pop(holder).key, when)

    @property
    def at_peak(self) -> dict[int | None, int]:
        """Return the live bytes of each owner at the peak."""
        self._before_less()
        return self._at_peak

    @property
    def kinds_at_peak(self) -> dict[str, int]:
        """Return the live bytes of each kind at the peak."""
        self._before_less()
        return self._kinds_at_peak

    def _hold(self, buffer: Storage, entry: _Entry, now: int) -> None:
        number = id(buffer.holder)
        known = self._holders.get(number)
        entry.holders += 1
        self._holders[number] = holder = _Holder(buffer.holder, _died)
        holder.number, holder.key, holder.dead = number, buffer.key, self._dead
        if known is not None:
            # A storage that was resized has a new address.
            self._release(known.key, now)

    def _release(self, key: object, when: int) -> None:
        entry = self._entries[key]
        entry.holders -= 1
        if not entry.holders:
            self._before_less()
            del self._entries[key]
            self._add(entry, -entry.size)
            self.changed(when, entry.owner, -entry.size)

    def _add(self, entry: _Entry, size: int) -> None:
        owner = entry.owner
        self.by_owner[owner] += size
        self.by_kind[entry.kind] += size
        if owner is None:
            self.given += size
            self.given_peak = max(self.given_peak, self.given)
        else:
            self.live += size

    def _before_less(self) -> None:
        # Copy once for each peak, not at each birth on the way to it.
        if self._peak_is_new:
            self._at_peak = {owner: size for owner, size in self.by_owner.items() if size}
            self._kinds_at_peak = {kind: size for kind, size in self.by_kind.items() if size}
            self._peak_is_new = False
