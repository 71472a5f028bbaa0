"""Identity of values: which node a value comes from, while a program runs.

Handles tensors whose addresses are reused, and symbolic tensors, which have names in their graphs.
Keeps no tensor and no graph alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

from amanda_core.interface.facts import Facts
from amanda_core.runtime.weak import Known

__all__ = [
    "EagerValues",
    "Origin",
    "Port",
    "SymbolicValues",
]


class Port(NamedTuple):
    """Node and position that a value comes from.

    Attributes:
        node: Index of the node.
        output: Output position; None for an input that the operator wrote but does not return.
    """

    node: int
    output: int | None


class Origin(NamedTuple):
    """Port and execution that a value comes from.

    Attributes:
        port: Node and position.
        call: Number of the node's execution.
    """

    port: Port
    call: int = 0


class _Entry(NamedTuple):
    origin: Origin
    serial: int


class EagerValues:
    """Origins of eager tensors, by the tensors' identity.

    A tensor comes from the last node that returned or wrote it: an operator that works in place, or
    returns its input, creates a new version of the value.

    Args:
        facts: The driver's facts about tensors.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._entries: Known[_Entry] = Known()
        #: Tensor whose memory was written -> the write. Views are listed under their base.
        self._written: Known[_Entry] = Known()
        self._serial = 0

    def find(self, value: Any) -> Origin | None:
        """Return the origin of a tensor, or None if it is unknown."""
        entry = self._entries.get(value)
        return None if entry is None else entry.origin

    def last_write(self, value: Any) -> Origin | None:
        """Return the last write to a tensor or to another tensor that shares its memory."""
        written = self._write_of(value)
        return None if written is None else written.origin

    def find_write(self, value: Any) -> Origin | None:
        """Return the last write if it is newer than the origin that `find` returns."""
        written = self._write_of(value)
        if written is None:
            return None
        entry = self._entries.get(value)
        newer = entry is None or written.serial > entry.serial
        return written.origin if newer else None

    def set(self, value: Any, origin: Origin) -> None:
        """Record the origin of a tensor from now on."""
        self._serial += 1
        self._entries.set(value, _Entry(origin, self._serial))

    def set_source(self, value: Any, origin: Origin) -> None:
        """Record the origin of a tensor that existed before all writes."""
        self._entries.set(value, _Entry(origin, 0))

    def set_written(self, value: Any, origin: Origin) -> None:
        """Record a write to a tensor, and so to all tensors that share its memory.

        A parameter keeps its own origin, whichever operator writes it.
        """
        self._serial += 1
        if not self.facts.is_parameter(value):
            self._entries.set(value, _Entry(origin, self._serial))
        self._written.set(self.facts.base(value), _Entry(origin, self._serial))

    def _write_of(self, value: Any) -> _Entry | None:
        return self._written.get(self.facts.base(value)) if len(self._written) else None

    def __len__(self) -> int:
        return len(self._entries)


class SymbolicValues(EagerValues):
    """Origins of the symbolic tensors of graphs, by graph and name where the driver says both."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._graphs: weakref.WeakKeyDictionary[Any, dict[Hashable, Origin]] = (
            weakref.WeakKeyDictionary()
        )

    def find(self, value: Any) -> Origin | None:
        """Return the origin of a tensor, or None if it is unknown."""
        symbol = self.facts.symbol(value)
        return super().find(value) if symbol is None else self._in(symbol).get(symbol[1])

    def set(self, value: Any, origin: Origin) -> None:
        """Record the origin of a tensor from now on."""
        symbol = self.facts.symbol(value)
        if symbol is None:
            super().set(value, origin)
        else:
            self._in(symbol)[symbol[1]] = origin

    def set_source(self, value: Any, origin: Origin) -> None:
        """Record the origin of a tensor that existed before all writes."""
        if self.facts.symbol(value) is None:
            super().set_source(value, origin)
        else:
            self.set(value, origin)

    def set_written(self, value: Any, origin: Origin) -> None:
        """Record a write to a tensor; nothing that has a name in a graph is written in place."""
        if self.facts.symbol(value) is None:
            super().set_written(value, origin)

    def _in(self, symbol: tuple[Any, Hashable]) -> dict[Hashable, Origin]:
        return self._graphs.setdefault(symbol[0], {})
