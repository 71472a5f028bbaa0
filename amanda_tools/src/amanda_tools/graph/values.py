"""Which node a value comes from, while a program runs.

Owns the identity of values: of tensors of eager modes, whose addresses are given again, and of
symbolic tensors of graphs. Keeps no tensor and no graph alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, NamedTuple

from amanda_core.facts import Facts
from amanda_core.weak import Known
from amanda_tools.tensors.values import UNKNOWN

__all__ = [
    "EagerValues",
    "Origin",
    "Port",
    "SymbolicValues",
    "Values",
]


class Port(NamedTuple):
    """Where a value comes from.

    Attributes:
        node: Index of the node.
        output: Output position; None for an input that the operator wrote and does not return.
    """

    node: int
    output: int | None


class Origin(NamedTuple):
    """Where and when a value was made.

    Attributes:
        port: Where it comes from.
        call: Number of the node's execution.
    """

    port: Port
    call: int = 0


class _Entry(NamedTuple):
    origin: Origin
    serial: int


class EagerValues:
    """The nodes that tensors come from, by the tensors' identity.

    The newest node that returned or wrote a tensor is where it comes from: an operator that works
    in place, or returns its input, gives a new version of the value.

    Args:
        facts: What the driver tells of tensors.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._entries: Known[_Entry] = Known()
        #: Tensors whose memory was written -> the write. Views stand under what they are views of.
        self._written: Known[_Entry] = Known()
        self._serial = 0

    def find(self, value: Any) -> Origin | None:
        """Where a tensor comes from; None for one that is not known."""
        entry = self._entries.get(value)
        return None if entry is None else entry.origin

    def last_write(self, value: Any) -> Origin | None:
        """Return what has written a tensor, or another of the same memory, last."""
        written = self._write_of(value)
        return None if written is None else written.origin

    def find_write(self, value: Any) -> Origin | None:
        """The last write, if it is newer than what `find` gives."""
        written = self._write_of(value)
        if written is None:
            return None
        entry = self._entries.get(value)
        newer = entry is None or written.serial > entry.serial
        return written.origin if newer else None

    def set(self, value: Any, origin: Origin) -> None:
        """A tensor comes from there from now on."""
        self._serial += 1
        self._entries.set(value, _Entry(origin, self._serial))

    def set_source(self, value: Any, origin: Origin) -> None:
        """A tensor was there before all that was written."""
        self._entries.set(value, _Entry(origin, 0))

    def set_written(self, value: Any, origin: Origin) -> None:
        """Note what wrote a tensor, and with it all that share its memory.

        A parameter stays one, whoever writes it.
        """
        self._serial += 1
        if not self.facts.is_parameter(value):
            self._entries.set(value, _Entry(origin, self._serial))
        self._written.set(self.facts.base(value), _Entry(origin, self._serial))

    def _write_of(self, value: Any) -> _Entry | None:
        return self._written.get(self.facts.base(value)) if len(self._written) else None

    def __len__(self) -> int:
        return len(self._entries)


class SymbolicValues:
    """The nodes that the tensors of TensorFlow's graphs come from, by graph and name."""

    def __init__(self, facts: Facts = UNKNOWN) -> None:
        self.facts = facts
        self._graphs: weakref.WeakKeyDictionary[Any, dict[Hashable, Origin]] = (
            weakref.WeakKeyDictionary()
        )

    def find(self, value: Any) -> Origin | None:
        """Where a tensor comes from; None for one that is not known."""
        return self._graphs.get(value.graph, {}).get(value.name)

    def find_write(self, value: Any) -> Origin | None:
        """None: nothing is written in place."""
        return None

    last_write = find_write

    def set(self, value: Any, origin: Origin) -> None:
        """A tensor comes from there."""
        self._graphs.setdefault(value.graph, {})[value.name] = origin

    set_source = set

    def set_written(self, value: Any, origin: Origin) -> None:
        """Not in graphs."""


Values = EagerValues | SymbolicValues
