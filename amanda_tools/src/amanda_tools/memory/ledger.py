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
from typing import Any, TypeVar

from amanda_core.interface.facts import Storage

__all__ = ["WORKSPACES", "Ledger"]

#: Kind of what an operator had while it ran and neither returned nor saved.
WORKSPACES = "workspaces"

K = TypeVar("K")


@dataclass(slots=True)
class _Entry:
    owner: int | None
    size: int
    kind: str
    holders: int = 0


class _Holder(weakref.ref[Any]):
    """A weak reference to what holds a buffer: one object, as there is one for each tensor."""

    __slots__ = ("dead", "entry", "key", "number")
    dead: deque[tuple[int, int]]
    entry: _Entry
    key: object
    number: int


def _died(holder: Any, now: Callable[[], int] = time.perf_counter_ns) -> None:
    # At its end the interpreter takes the names of this module away, but no defaults.
    holder.dead.append((holder.number, now()))


class Ledger:
    """Live buffers by owner. An owner is a number; None owns the buffers that existed before.

    Attributes:
        live: Bytes of live buffers with an owner.
        given: Bytes of live buffers that existed before.
        peak: Maximum of `live`, and of what `reach` was told.
        peak_owner: Owner of the buffer whose birth caused the peak, or of the workspace in it.
        by_owner: Owner -> bytes of its live buffers.
        by_kind: Kind of a buffer, such as weights -> bytes of live buffers.
        dead: Number of each buffer's holder that has died since, and the time.
        known: ``id()`` of what holds a live buffer -> its key and size. Once `settle` was called
            for those in `dead`, `meet` has nothing to record of these.
        changed: Called at each change with the time, the buffer's owner, and the bytes, which are
            negative for a death.
    """

    def __init__(self, changed: Callable[[int, int | None, int], None]) -> None:
        self.live = self.given = self.peak = self.given_peak = 0
        self.peak_owner: int | None = None
        self.by_owner: Counter[int | None] = Counter()
        self.by_kind: Counter[str] = Counter()
        self.changed = changed
        self.known: dict[int, tuple[Hashable, int]] = {}
        self._entries: dict[object, _Entry] = {}
        self._holders: dict[int, _Holder] = {}
        self.dead: deque[tuple[int, int]] = deque()
        #: Bytes of the workspace at the peak.
        self._workspace = 0
        #: What has changed since the peak: owner or kind -> the bytes that were live at the peak.
        self._owners_since: dict[int | None, int] = {}
        self._kinds_since: dict[str, int] = {}

    def meet(self, buffer: Storage, owner: int | None, now: int, kind: str = "") -> int:
        """Record a buffer, and its owner if it is new.

        The kind of a buffer that existed before is the first one that is not empty.

        Returns:
            Number of bytes allocated: the size of a new buffer, or the growth of a known one.
        """
        if self.dead:
            self.settle()
        key, size, held = buffer
        known = self._holders.get(id(held))
        if known is not None and known.key == key:
            met = known.entry
            unnamed = kind and not met.kind and owner is None and met.owner is None
            if met.size == size and not unnamed:
                return 0
        entry = self._entries.get(key)
        new = entry is None
        if entry is None:
            entry = self._entries[key] = _Entry(owner, 0, kind)
        elif owner is None and entry.owner is None and kind and not entry.kind:
            size_so_far = entry.size
            self._add(entry, -size_so_far, at_peak=True)
            entry.kind = kind
            self._add(entry, size_so_far, at_peak=True)
        if known is None or known.key != key:
            entry.holders += 1
            self._holders[id(held)] = holder = _Holder(held, _died)
            holder.number, holder.key, holder.entry = id(held), key, entry
            holder.dead = self.dead
            if known is not None:
                # A storage that was resized has a new address.
                self._release(known, now)
        more = size - entry.size
        if more and entry.holders > 1:
            self.known.clear()  # That of another holder has this size now.
        if entry.kind or entry.owner is not None:
            self.known[id(held)] = key, size
        if not more:
            return 0
        entry.size = size
        # A buffer that existed before was live at the peak, even if it is met only now.
        self._add(entry, more, at_peak=new and owner is None)
        if self.live > self.peak:
            self._peak(owner, 0)
        self.changed(now, entry.owner, more)
        # Growth of a buffer that existed before was caused by the operator that wrote it.
        return more if new or more > 0 else 0

    def reach(self, live: int, owner: int, now: int) -> int:
        """Record how much was live at most while an operator ran, with its workspace.

        Call it when the operator's results are known. What they do not explain is its workspace.

        Returns:
            Bytes of the workspace.
        """
        workspace = live - self.live
        if workspace <= 0:
            return 0
        if live > self.peak:
            self._peak(owner, workspace)
        self.live += workspace
        self.changed(now, owner, workspace)
        self.live -= workspace
        self.changed(now, owner, -workspace)
        return workspace

    def owner_of(self, key: Hashable) -> int | None:
        """Return who allocated a live buffer; None if it existed before or is not known."""
        self.settle()
        entry = self._entries.get(key)
        return None if entry is None else entry.owner

    def settle(self) -> None:
        """Remove the buffers that have died."""
        while self.dead:
            holder, when = self.dead.popleft()
            self._release(self._holders.pop(holder), when)

    @property
    def at_peak(self) -> dict[int | None, int]:
        """Return the live bytes of each owner at the peak."""
        owners = {**self.by_owner, **self._owners_since}
        if self._workspace:
            owners[self.peak_owner] = owners.get(self.peak_owner, 0) + self._workspace
        return _nonzero(owners)

    @property
    def kinds_at_peak(self) -> dict[str, int]:
        """Return the live bytes of each kind at the peak."""
        kinds = {**self.by_kind, **self._kinds_since, WORKSPACES: self._workspace}
        return _nonzero(kinds)

    def _peak(self, owner: int | None, workspace: int) -> None:
        self.peak, self.peak_owner = self.live + workspace, owner
        self._workspace = workspace
        self._owners_since.clear()
        self._kinds_since.clear()

    def _release(self, holder: _Holder, when: int) -> None:
        entry = holder.entry
        entry.holders -= 1
        self.known.pop(holder.number, None)
        if not entry.holders:
            del self._entries[holder.key]
            self._add(entry, -entry.size)
            self.changed(when, entry.owner, -entry.size)

    def _add(self, entry: _Entry, size: int, at_peak: bool = False) -> None:
        owner, kind = entry.owner, entry.kind
        before = self.by_owner.get(owner, 0)
        self.by_owner[owner] = before + size
        if owner in self._owners_since:
            if at_peak:
                self._owners_since[owner] += size
        elif not at_peak:
            self._owners_since[owner] = before
        before = self.by_kind.get(kind, 0)
        self.by_kind[kind] = before + size
        if kind in self._kinds_since:
            if at_peak:
                self._kinds_since[kind] += size
        elif not at_peak:
            self._kinds_since[kind] = before
        if owner is None:
            self.given += size
            self.given_peak = max(self.given_peak, self.given)
        else:
            self.live += size


def _nonzero(sizes: dict[K, int]) -> dict[K, int]:
    return {owner: size for owner, size in sizes.items() if size}
