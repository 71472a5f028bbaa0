"""Live memory over time, by module: a bounded number of moments, the peak among them.

The time of the run is divided into stretches, after the run and from each change and its owner. Of
a stretch the moment counts at which most was live; where nothing changes, what was left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Areas", "Change", "areas"]

#: Number of stretches of time: each has more than a pixel on a phone, or areas have gaps.
MOMENTS = 200
#: Number of modules that are shown; the others are added up.
MODULES = 7
REST = "(others)"
#: How often a module is divided: modules may be in one another without end.
_ROUNDS = 32


class Change(NamedTuple):
    """A buffer that was born or has died.

    Attributes:
        time: Time in nanoseconds.
        owner: Number of its operator; None for what existed before.
        size: Bytes, negative for a death.
    """

    time: int
    owner: int | None
    size: int


class Areas(NamedTuple):
    """Live bytes at some moments.

    Attributes:
        times: Seconds from the first change to the beginning of each stretch, and to the end of the
            last one. So no two are too near to be drawn.
        modules: ``{"name": ..., "live": [bytes at each moment]}`` of each module.
    """

    times: list[float]
    modules: list[dict[str, Any]]


def areas(changes: Sequence[Change], homes: Sequence[str]) -> Areas:
    """Return the live memory of operators over time.

    Args:
        changes: All changes, in order.
        homes: Module of each owner, by number.
    """
    changes = [change for change in changes if change.owner is not None]
    if not changes:
        return Areas([], [])
    names = _groups(changes, homes)
    first = changes[0].time
    length = max(1, (changes[-1].time - first) // MOMENTS + 1)
    live: dict[str, int] = {}
    most: dict[str, int] = {}
    total, highest, stretch = 0, -1, 0
    times: list[float] = []
    rows: list[dict[str, int]] = []

    def note(at: int, row: dict[str, int]) -> None:
        times.append(at * length / 1e9)
        rows.append(row)

    for change in changes:
        assert change.owner is not None
        at = (change.time - first) // length
        if at != stretch:
            note(stretch, most)
            # Nothing changes between the two, from the first such stretch to the last.
            for still in sorted({stretch + 1, at - 1} - {stretch, at}):
                note(still, dict(live))
            stretch, highest = at, -1
        name = names[change.owner]
        live[name] = live.get(name, 0) + change.size
        total += change.size
        if total > highest:
            highest, most = total, dict(live)
    note(stretch, most)
    note(stretch + 1, dict(live))
    every = sorted(live, key=lambda name: -max(row.get(name, 0) for row in rows))
    found = [{"name": name, "live": [row.get(name, 0) for row in rows]} for name in every[:MODULES]]
    if len(every) > MODULES:
        rest = [sum(row.get(name, 0) for name in every[MODULES:]) for row in rows]
        found.append({"name": REST, "live": rest})
    return Areas(times, found)


def _groups(changes: Sequence[Change], homes: Sequence[str]) -> list[str]:
    """Return the name of each owner's area: the largest modules are divided into those inside."""
    sizes = [0] * len(homes)
    for change in changes:
        if change.owner is not None:
            sizes[change.owner] += abs(change.size)
    paths = [tuple(home.replace("/", ".").split(".")) for home in homes]
    names = [path[:1] for path in paths]
    for _ in range(_ROUNDS):
        within: dict[tuple[str, ...], dict[tuple[str, ...], int]] = {}
        for name, path, size in zip(names, paths, sizes, strict=True):
            inside = within.setdefault(name, {})
            inside[path[: len(name) + 1]] = inside.get(path[: len(name) + 1], 0) + size
        divisible = [name for name, inside in within.items() if any(p != name for p in inside)]
        largest = max(divisible, key=lambda name: sum(within[name].values()), default=None)
        if largest is None or len(within) + len(within[largest]) - 1 > MODULES:
            break
        names = [
            path[: len(name) + 1] if name == largest else name
            for name, path in zip(names, paths, strict=True)
        ]
    return [".".join(name) for name in names]
