"""Trace files in Chrome's format, which Perfetto and chrome://tracing display.

Times are in microseconds, and each event has a `pid` and a `tid`. Spans are complete events
(``X``), nested within their track; overlapping spans get further tracks. Other events are arrows
(``s``, ``f``), counters (``C``) and names (``M``). Large files are compressed, which the viewers
accept.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amanda_tools.kit.output.folders import whole_file

__all__ = ["Span", "TraceFile", "lanes"]

#: Size in bytes above which a file is compressed.
_LARGE = 16 << 20


@dataclass(frozen=True)
class Span:
    """An interval of time on a track.

    Attributes:
        track: Name of the track.
        name: Name of the event.
        start: Start in nanoseconds.
        end: End in nanoseconds.
        category: Kind of event, by which viewers filter.
        arguments: Details that viewers display.

    >>> Span("thread 1", "relu", start=0, end=2_000).category
    'op'
    """

    track: str
    name: str
    start: int
    end: int
    category: str = "op"
    arguments: Mapping[str, Any] = field(default_factory=dict)


class TraceFile:
    """The events of one process.

    >>> trace = TraceFile("training")
    >>> trace.add_spans([Span("gpu", "linear", 0, 5_000), Span("gpu", "relu", 5_000, 6_000)])
    [1, 1]

    ``trace.write(Path("trace.json"))`` writes the file.
    """

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._tids: dict[str, int] = {}
        self._flows = 0
        self._events: list[dict[str, Any]] = []
        self._metadata("process_name", name, 0)

    def add_spans(self, spans: Sequence[Span]) -> list[int]:
        """Add spans. Spans of a track that overlap without nesting are moved to another track.

        Returns:
            The `tid` of each span.
        """
        found = [0] * len(spans)
        tracks: dict[str, list[int]] = {}
        for place, span in enumerate(spans):
            tracks.setdefault(span.track, []).append(place)
        for track, places in tracks.items():
            numbers = lanes((spans[place].start, spans[place].end) for place in places)
            for place, number in zip(places, numbers, strict=True):
                span = spans[place]
                found[place] = self._tid(f"{track} ({number + 1})" if number else track)
                self._events.append(
                    {
                        "ph": "X",
                        "name": span.name,
                        "cat": span.category,
                        "ts": span.start / 1e3,
                        "dur": (span.end - span.start) / 1e3,
                        "pid": self._pid,
                        "tid": found[place],
                        "args": dict(span.arguments),
                    }
                )
        return found

    def add_flow(self, name: str, begin: tuple[int, int], end: tuple[int, int]) -> None:
        """Add an arrow from one span to another.

        Args:
            name: Name of the arrow.
            begin: `tid` of the first span, and a time within it in nanoseconds.
            end: `tid` of the second span, and a time within it.
        """
        self._flows += 1
        for phase, (tid, time) in (("s", begin), ("f", end)):
            event = {"ph": phase, "name": name, "cat": "flow", "id": self._flows}
            # Bind the arrow to the span around this time, not to the next one.
            more = {"bp": "e"} if phase == "f" else {}
            self._events.append({**event, **more, "ts": time / 1e3, "pid": self._pid, "tid": tid})

    def add_counter(self, name: str, time: int, values: Mapping[str, float]) -> None:
        """Add the values of a counter at a time in nanoseconds."""
        event = {"ph": "C", "name": name, "ts": time / 1e3, "pid": self._pid, "tid": 0}
        self._events.append({**event, "args": dict(values)})

    def write(self, path: Path) -> Path:
        """Write the file and remove what an earlier run has left of it.

        Returns:
            The path, with ``.gz`` appended if the file is large.
        """
        content = json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}).encode()
        compressed = path.with_name(f"{path.name}.gz")
        for earlier in (path, compressed):
            earlier.unlink(missing_ok=True)
        if len(content) > _LARGE:
            path, content = compressed, gzip.compress(content)
        with whole_file(path) as new:
            new.write_bytes(content)
        return path

    def _tid(self, track: str) -> int:
        if track not in self._tids:
            self._tids[track] = len(self._tids) + 1
            self._metadata("thread_name", track, self._tids[track])
        return self._tids[track]

    def _metadata(self, what: str, name: str, tid: int) -> None:
        event = {"ph": "M", "name": what, "pid": self._pid, "tid": tid, "ts": 0}
        self._events.append({**event, "args": {"name": name}})


def lanes(spans: Iterable[tuple[int, int]]) -> list[int]:
    """Assign each span ``(start, end)`` to a lane, so that the spans of a lane nest or do not
    overlap.

    >>> lanes([(0, 10), (2, 5), (8, 12)])
    [0, 0, 1]
    """
    numbered = sorted(enumerate(spans), key=lambda item: (item[1][0], -item[1][1]))
    open_ends: list[list[int]] = []
    found = [0] * len(numbered)
    for index, (start, end) in numbered:
        lane = 0
        while lane < len(open_ends):
            ends = open_ends[lane]
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or end <= ends[-1]:
                break
            lane += 1
        else:
            open_ends.append([])
        open_ends[lane].append(end)
        found[index] = lane
    return found
