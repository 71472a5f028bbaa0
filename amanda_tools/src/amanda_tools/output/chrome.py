"""Trace files of Chrome's format, which Perfetto and chrome://tracing show.

Owns the format: times in microseconds, one `pid` and `tid` for each event, complete events (``X``)
nested on each track, of which there are as many as that takes, arrows between them (``s``, ``f``),
counters (``C``), names (``M``). Large files are compressed, which the viewers take as well.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Span", "TraceFile", "lanes"]

#: Bytes above which a file is compressed.
_LARGE = 16 << 20


@dataclass(frozen=True)
class Span:
    """A stretch of time on a track.

    Attributes:
        track: Name of the track.
        name: What it is called.
        start: In nanoseconds.
        end: In nanoseconds.
        category: Kind of event, by which viewers filter.
        arguments: What is shown of it.
    """

    track: str
    name: str
    start: int
    end: int
    category: str = "op"
    arguments: Mapping[str, Any] = field(default_factory=dict)


class TraceFile:
    """The events of one process."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._tids: dict[str, int] = {}
        self._flows = 0
        self._events: list[dict[str, Any]] = []
        self._metadata("process_name", name, 0)

    def add_spans(self, spans: Sequence[Span]) -> list[int]:
        """Add stretches of time; those of a track that overlap without nesting get another one.

        Returns:
            The `tid` of each.
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
        """Add an arrow from one stretch of time to another.

        Args:
            name: What it is called.
            begin: `tid` of a stretch, and a time in it, in nanoseconds.
            end: The same of the other.
        """
        self._flows += 1
        for phase, (tid, time) in (("s", begin), ("f", end)):
            event = {"ph": phase, "name": name, "cat": "flow", "id": self._flows}
            # The arrow ends at what is around its time, not at what comes next.
            more = {"bp": "e"} if phase == "f" else {}
            self._events.append({**event, **more, "ts": time / 1e3, "pid": self._pid, "tid": tid})

    def add_counter(self, name: str, time: int, values: Mapping[str, float]) -> None:
        """Add the values of a counter at a time, in nanoseconds."""
        event = {"ph": "C", "name": name, "ts": time / 1e3, "pid": self._pid, "tid": 0}
        self._events.append({**event, "args": dict(values)})

    def write(self, path: Path) -> Path:
        """Write the file, in place of what an earlier run has left of it.

        Returns:
            The path, with ``.gz`` behind it if the file is large.
        """
        content = json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}).encode()
        compressed = path.with_name(f"{path.name}.gz")
        for earlier in (path, compressed):
            earlier.unlink(missing_ok=True)
        if len(content) > _LARGE:
            compressed.write_bytes(gzip.compress(content))
            return compressed
        path.write_bytes(content)
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
    """A track for each span ``(start, end)``, so that those of one track nest or are apart.

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
