"""Time on a device, measured with pairs of events in its streams.

Manages a pool of events. Events that have passed are read while the program runs, without waiting;
the others are read after one synchronization at the end. Imports torch only when needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["CudaEvents", "Event", "EventPairs", "Events", "Pair"]


class Event(Protocol):
    """A marker in a stream of work."""

    def query(self) -> bool:
        """Return True if the work before it is done."""

    def elapsed_time(self, end: Any) -> float:
        """Return the time from this event to another, in milliseconds; both must have passed."""


class Events(Protocol):
    """Factory of events."""

    def make(self) -> Any:
        """Create an event."""

    def record(self, event: Any, device: str) -> str:
        """Record an event in the current stream of a device; return the name of the stream."""

    def synchronize(self, device: str) -> None:
        """Wait until a device has completed its work."""


class CudaEvents:
    """CUDA events from PyTorch."""

    def make(self) -> Any:
        """Create an event that records time."""
        import torch

        event: Any = torch.cuda.Event  # Untyped in torch's stubs.
        return event(enable_timing=True)

    def record(self, event: Any, device: str) -> str:
        """Record an event in the current stream of a device; return the name of the stream."""
        import torch

        stream = torch.cuda.current_stream(device)
        event.record(stream)
        return f"{device} stream {stream.stream_id}"

    def synchronize(self, device: str) -> None:
        """Wait for all streams of a device."""
        import torch

        torch.cuda.synchronize(device)


class Pair:
    """Start and end of one execution in a stream.

    Attributes:
        device: The device.
        stream: Name of the stream in which it starts.
        parent: The enclosing pair, or None.
        inner: Time of the pairs directly inside, in nanoseconds.
        read: Called with the start since the first event of the device, the total time and the self
            time, in nanoseconds.
    """

    __slots__ = ("begin", "device", "end", "inner", "parent", "read", "stream")

    def __init__(self, device: str, begin: Event, stream: str, parent: Pair | None) -> None:
        self.device, self.begin, self.stream, self.parent = device, begin, stream, parent
        self.end: Event | None = None
        self.inner = 0
        self.read: Callable[[int, int, int], None] | None = None


class EventPairs:
    """Pairs of events from a pool.

    Args:
        events: Factory of the events.
        waiting: Number of pairs that may be pending before those that have passed are read.
    """

    def __init__(self, events: Events, waiting: int = 4096) -> None:
        self._events = events
        self._waiting = waiting
        self._free: list[Any] = []
        self._pending: deque[Pair] = deque()
        self._origins: dict[str, Any] = {}

    def begin(self, device: str, parent: Pair | None = None) -> Pair:
        """Record the start of an execution."""
        if device not in self._origins:
            self._origins[device] = self._events.make()
            self._events.record(self._origins[device], device)
        event = self._event()
        stream = self._events.record(event, device)
        if parent is not None and parent.device != device:
            parent = None
        return Pair(device, event, stream, parent)

    def end(self, pair: Pair, read: Callable[[int, int, int], None]) -> None:
        """Record the end of an execution; `read` is called when the times are known."""
        pair.end, pair.read = self._event(), read
        self._events.record(pair.end, pair.device)
        self._pending.append(pair)
        if len(self._pending) > self._waiting:
            # An inner pair ends before the enclosing one, so its time is known in time.
            while self._pending and self._pending[0].end.query():  # type: ignore[union-attr]
                self._read(self._pending.popleft())

    def finish(self) -> None:
        """Read all pending pairs, after synchronizing each device once."""
        for device in {pair.device for pair in self._pending}:
            self._events.synchronize(device)
        while self._pending:
            self._read(self._pending.popleft())

    def _event(self) -> Any:
        return self._free.pop() if self._free else self._events.make()

    def _read(self, pair: Pair) -> None:
        assert pair.end is not None
        assert pair.read is not None
        start = round(self._origins[pair.device].elapsed_time(pair.begin) * 1e6)
        total = round(pair.begin.elapsed_time(pair.end) * 1e6)
        if pair.parent is not None:
            pair.parent.inner += total
        self._free += (pair.begin, pair.end)
        pair.read(start, total, total - pair.inner)
