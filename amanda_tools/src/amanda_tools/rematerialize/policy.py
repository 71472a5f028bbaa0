"""Which value to evict: the heuristics of dynamic tensor rematerialization.

Owns the graph of values as the heuristics see it: costs, sizes, ages, and which neighbors are
evicted. Knows no framework and no memory.

Source: Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, section 3 and appendix D.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeVar

from amanda_core.runtime.threads import WeakGroup

__all__ = ["Entry", "Heuristic", "choose"]

Heuristic = Literal["neighborhood", "classes", "local"]


class Entry:
    """A value that can be evicted and computed again.

    Args:
        cost: Time that computing it takes, in any unit.
        size: Its size in bytes.
        parents: The values that it is computed from.

    Attributes:
        resident: Whether it is in memory.
        last_access: When an operator last used it, in the unit of `cost`.
    """

    __slots__ = (
        "__weakref__",
        "_children",
        "_class",
        "cost",
        "last_access",
        "parents",
        "resident",
        "size",
    )

    def __init__(self, cost: float, size: int, parents: Iterable[Entry] = ()) -> None:
        self.cost, self.size = cost, size
        self.parents = tuple(parents)
        self.resident = True
        self.last_access = 0.0
        self._children: WeakGroup[Entry] = WeakGroup()
        self._class: _Class | None = None
        for parent in self.parents:
            parent._children.add(self)

    def evict(self) -> None:
        """Mark it as evicted."""
        self.resident = False
        self._class = _Class(self.cost)
        for neighbor in self._evicted_neighbors():
            if neighbor._class is not None:
                self._class.join(neighbor._class)

    def restore(self) -> None:
        """Mark it as computed again."""
        self.resident = True
        if self._class is not None:
            # Classes cannot be split. As in the paper, its cost is taken away from its class.
            self._class.root().cost -= self.cost
            self._class = None

    def score(self, heuristic: Heuristic, now: float) -> float:
        """Return how bad it would be to evict this value.

        Args:
            heuristic: ``neighborhood`` counts the evicted ancestors and descendants exactly
                (h_DTR), ``classes`` approximates these by classes of neighbors (h_DTR_eq), and
                ``local`` counts the value alone (h_DTR_local).
            now: The current time, in the unit of `cost`.
        """
        cost = self.cost
        if heuristic == "neighborhood":
            cost += sum(entry.cost for entry in self._evicted("parents"))
            cost += sum(entry.cost for entry in self._evicted("children"))
        elif heuristic == "classes":
            roots = {n._class.root() for n in self._evicted_neighbors() if n._class is not None}
            cost += sum(root.cost for root in roots)
        benefit = self.size * (now - self.last_access)
        return cost / benefit if benefit > 0 else float("inf")

    def _neighbors(self, direction: str) -> Iterator[Entry]:
        yield from self.parents if direction == "parents" else self._children

    def _evicted_neighbors(self) -> set[Entry]:
        found = {*self.parents, *self._children}
        return {entry for entry in found if not entry.resident}

    def _evicted(self, direction: str) -> set[Entry]:
        """Return the values that it is connected to by evicted values only, in one direction."""
        found: set[Entry] = set()
        open_ = [self]
        while open_:
            for entry in open_.pop()._neighbors(direction):
                if not entry.resident and entry not in found:
                    found.add(entry)
                    open_.append(entry)
        return found


class _Class:
    """A class of connected evicted values, in a union-find forest."""

    __slots__ = ("cost", "parent")

    def __init__(self, cost: float) -> None:
        self.cost = cost
        self.parent: _Class | None = None

    def root(self) -> _Class:
        found = self
        while found.parent is not None:
            found = found.parent
        if self is not found:
            self.parent = found
        return found

    def join(self, other: _Class) -> None:
        mine, its = self.root(), other.root()
        if mine is not its:
            its.parent = mine
            mine.cost += its.cost


E = TypeVar("E", bound=Entry)


def choose(entries: Sequence[E], heuristic: Heuristic, now: float) -> E:
    """Return the value to evict: the one with the lowest score, of equal ones the last.

    Args:
        entries: Values that may be evicted, at least one.
        heuristic: See `Entry.score`.
        now: The current time.
    """
    best, lowest = entries[0], float("inf")
    for entry in entries:
        score = entry.score(heuristic, now)
        if score <= lowest:
            best, lowest = entry, score
    return best
