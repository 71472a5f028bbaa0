"""Shared by the tests of profilers: a clock that the test controls, and checks of trace files."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from amanda_tools.latency import Latency

__all__ = ["MS", "FakeClock", "FakeEvent", "checked_trace", "latency_by"]

MS = 1_000_000


class FakeClock:
    """A clock that the test controls, in nanoseconds.

    Args:
        tick: Time by which each reading advances it.
    """

    def __init__(self, tick: int = 0) -> None:
        self.time, self.tick = 1_000, tick

    def __call__(self) -> int:
        self.time += self.tick
        return self.time

    def sleep(self, time: int) -> None:
        """Advance the clock."""
        self.time += time


def latency_by(clock: FakeClock, **options: Any) -> Latency:
    """Return the profiler with a clock that the test controls."""
    kind: Any = type("Latency", (Latency,), {"now": staticmethod(clock)})
    found: Latency = kind(**{"warmup": 0} | options)
    return found


class FakeEvent:
    """An event of a device whose clock the test controls."""

    def __init__(self) -> None:
        self.time: int | None = None
        self.done = False

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.done
        assert end.done
        assert self.time is not None
        assert end.time is not None
        return (end.time - self.time) / 1e6


def checked_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace file, after checking required fields and nesting."""
    content = json.loads(path.read_text())
    events: list[dict[str, Any]] = content["traceEvents"]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts"} <= set(event)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    for spans in tracks.values():
        open_ends: list[float] = []
        for start, duration in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            # In whole nanoseconds: the sum of two decimal fractions is not exact.
            assert not open_ends or round(1e3 * (start + duration)) <= round(1e3 * open_ends[-1])
            open_ends.append(start + duration)
    return events
