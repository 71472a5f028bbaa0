"""`Evictable`: which values in memory can be evicted, known without a look at all of them.

Owns the values in memory, and the smallest budget that follows from what can be evicted. Evicting
and restoring values is `store`'s.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from amanda_tools.rematerialize.executions import Value
from amanda_tools.rematerialize.result import RematerializedOp

__all__ = ["Evictable"]


@dataclass(slots=True)
class _Readers:
    """The values in memory that are computed from the program's tensors on one storage."""

    version: int
    values: dict[Value, None] = field(default_factory=dict)


class Evictable:
    """The values in memory, those of them that can be evicted now, and the floor.

    A value can be evicted if nothing else refers to its memory and it can be computed again. It is
    looked at when something happens that may change this: it is held, read or locked, the program's
    last tensor on it dies, or an operator writes what it is computed from.

    Only a write that no operator reports is found later: when the value is released, or at the next
    look at all values, of which there is one for as many operators as there are values. The floor
    is then raised as if the value had not been evictable since the look before. Memory that is
    freed and allocated again leaves no trace, unlike a write. From the first time that this is
    seen, all values are looked at for each operator.

    Args:
        users: Returns how many tensors refer to the memory of a tensor, as the driver knows it.

    Attributes:
        held: The values in memory, and the operator that saved each.
        found: Those that can be evicted.
        size: Bytes of these.
        floor: Maximum of the bytes that could not have been evicted.
        total: Maximum of all bytes.
    """

    def __init__(self, users: Callable[[torch.Tensor], int | None]) -> None:
        self.held: dict[Value, RematerializedOp] = {}
        self.found: dict[Value, None] = {}
        self.size = self.floor = self.total = 0
        self._users = users
        #: Those to look at for the next operator.
        self._open: dict[Value, None] = {}
        #: The values on which a tensor of the program has died.
        self._left: deque[weakref.ref[Value]] = deque()
        #: Storage of a tensor of the program -> the values that are computed from it.
        self._readers: dict[int, _Readers] = {}
        #: Whether the memory of a tensor was seen to be freed while a value needs it.
        self._frees = False
        #: Operators since the last look at all values. Maximum since then of the bytes that could
        #: not have been evicted, and of these if nothing could.
        self._calls = self._highest = self._bound = 0

    # What changes.

    def watch(self, value: Value, tensor: torch.Tensor) -> None:
        """Wait for the death of a tensor that lies in a value, unless another one is awaited."""
        if value.user is not None and value.user() is not None:
            return

        # A value that its own callback kept would never die.
        left, reference = self._left, weakref.ref(value)

        def died(_: object) -> None:
            left.append(reference)

        value.user = weakref.ref(tensor, died)

    def hold(self, value: Value, op: RematerializedOp) -> None:
        """Note that a value is in memory."""
        self.held[value] = op
        self._open[value] = None
        for storage, version in _read_storages(value):
            readers = self._readers.get(storage)
            if readers is None or readers.version != version:
                readers = self._readers[storage] = _Readers(version)
            readers.values[value] = None

    def release(self, value: Value) -> None:
        """Note that a value is about to leave memory."""
        self._verify(value)
        self._leave(value)
        del self.held[value]
        self._open.pop(value, None)
        for storage, _ in _read_storages(value):
            readers = self._readers.get(storage)
            if readers is not None:
                readers.values.pop(value, None)
                if not readers.values:
                    del self._readers[storage]
        if value.is_written:
            # What is computed from it can be computed again, as soon as it is itself.
            for one in value.readers:
                self.look_again(one)

    def look_again(self, value: Value) -> None:
        """Look at a value now and for the next operator, if it is in memory."""
        self._verify(value)
        self._doubt(value)

    def lock(self, value: Value) -> None:
        """Keep a value in memory until `unlock` is called as often."""
        self.look_again(value)
        value.locks += 1

    def unlock(self, value: Value) -> None:
        """End one `lock`."""
        value.locks -= 1
        self.look_again(value)

    def note_write(self, storage: int, before: int, value: Value | None) -> None:
        """Note that an operator has written a tensor of the program.

        Args:
            storage: The storage of the tensor.
            before: Its version before.
            value: The value in which the tensor lies; None if that is not known.
        """
        changed: Iterable[Value] = ()
        readers = self._readers.get(storage)
        # What was written before unnoticed is left to `_verify`, which raises the floor.
        if readers is not None and readers.version == before:
            changed = self._readers.pop(storage).values
        elif value is not None and value.version == before:
            changed = value.readers
        for one in changed:
            self._doubt(one)

    # What follows.

    def settle(self) -> None:
        """Find which values can be evicted now."""
        while self._left:
            value = self._left.popleft()()
            if value is not None and value not in self.found:
                self.look_again(value)
        self._calls += 1
        if self._frees or self._calls > len(self.held):
            self.verify()
            self._open = {one: None for one in list(self.held) if one not in self.found}
        for value in list(self._open):
            self._look(value)

    def require(self, total: int, later: int) -> None:
        """Raise the floor to what of all these bytes could not have been evicted now.

        Args:
            total: Bytes in use, with those that are going to be allocated.
            later: Bytes that are going to be restored if they were evicted.
        """
        self.total = max(self.total, total)
        self._highest = max(self._highest, total + later - self.size)
        self._bound = max(self._bound, total + later)
        self.floor = max(self.floor, self._highest)

    def verify(self) -> None:
        """Look whether what was found evictable is so, and raise the floor if it is not."""
        for value in list(self.found):
            self._verify(value)
        self._calls = self._highest = self._bound = 0

    def is_evictable(self, value: Value) -> bool:
        """Return True if evicting a value frees memory, and it can be computed again."""
        return self._is_repeatable(value) and self._is_unused(value)

    def _verify(self, value: Value) -> None:
        if value in self.found and not self.is_evictable(value):
            self._leave(value)
            self._highest = min(self._highest + value.size, self._bound)
            self.floor = max(self.floor, self._highest)

    def _look(self, value: Value) -> None:
        if self._is_repeatable(value):
            # Garbage collection may drop it meanwhile.
            if self._is_unused(value) and value in self.held:
                self.found[value] = None
                self.size += value.size
            elif value.user is None or value.user() is None:
                return  # When what refers to it is going to die is not known.
        self._open.pop(value, None)

    def _is_repeatable(self, value: Value) -> bool:
        if value.locks or value.is_written:
            return False
        repeatable = value.execution.is_repeatable
        if not repeatable:
            self._frees |= any(one.is_freed for one in value.execution.inputs)
        return repeatable

    def _is_unused(self, value: Value) -> bool:
        return value.alias is not None and self._users(value.alias) == 1  # The alias alone.

    def _doubt(self, value: Value) -> None:
        if value in self.held:
            self._leave(value)
            self._open[value] = None

    def _leave(self, value: Value) -> None:
        if value in self.found:
            del self.found[value]
            self.size -= value.size


def _read_storages(value: Value) -> Iterator[tuple[int, int]]:
    """Yield the program's tensors from which a value is computed: storages and versions."""
    execution = value.execution
    for number, one in enumerate(execution.inputs):
        if one.tensor is not None and number not in execution.written:
            yield one.tensor.untyped_storage()._cdata, one.tensor._version
