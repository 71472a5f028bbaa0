"""The results of a run of several processes: which are there, which are missing, and all as one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from amanda_core.cli.reports import is_result
from amanda_core.processes.index import unpacked
from amanda_core.processes.merging import Merged, merge
from amanda_core.results import tables as results
from amanda_core.results.output import index_of, processes_in
from amanda_core.results.run_state import RunState

__all__ = ["chosen", "ends", "merged", "parse_ranks"]

_RANK = re.compile(r"rank(\d+)(-restart\d+)?")
#: How many processes are named for each reason.
_NAMED = 20


def parse_ranks(text: str | None) -> set[int] | None:
    """Return the ranks that are written as ``0,3`` or ``0:4``; None for all.

    Raises:
        click.UsageError: They are not written so.

    >>> parse_ranks("0,4:6")
    {0, 4, 5}
    """
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?::(\d{1,7}))?\s*", part, re.ASCII)
        if match is None:
            raise click.UsageError(f"--ranks is {text[:80]!r}; write 0,3 or 0:4")
        found |= set(range(int(match[1]), int(match[2]))) if match[2] else {int(match[1])}
    return found


def chosen(folder: Path, ranks: set[int] | None) -> list[Path]:
    """Return the folders of the processes of a run, of a restarted one the last.

    Args:
        folder: The folder of the run.
        ranks: The ranks to choose; None for all processes.

    Raises:
        click.UsageError: One of the ranks has no folder.
    """
    found: dict[str, Path] = {}
    for path in processes_in(folder):
        found[path.name.partition("-restart")[0]] = path  # The last restart comes last.
    if ranks is None:
        return [*found.values()]
    if missing := [rank for rank in sorted(ranks) if f"rank{rank}" not in found]:
        named = ", ".join(map(str, missing[:_NAMED]))
        raise click.UsageError(f"{str(folder)!r} has no results of rank {named}")
    return [found[f"rank{rank}"] for rank in sorted(ranks)]


def ends(folder: Path, parts: Sequence[Path]) -> Iterator[str]:
    """Yield what is to be known of processes that are missing or did not end well.

    Args:
        folder: The folder of the run, or of a single process.
        parts: The folders of its processes.
    """
    state = RunState.read(folder)
    if state is not None and (text := state.sentence(folder)):
        yield text
    states = {path: RunState.read(path) for path in parts}
    processes = max((one.processes for one in states.values() if one is not None), default=0)
    there = {int(found[1]) for path in processes_in(folder) if (found := _RANK.match(path.name))}
    if missing := [rank for rank in range(processes) if rank not in there]:
        named = ", ".join(map(str, missing[:_NAMED]))
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        yield f"Of {processes} ranks there are no results of {named}{more}"
    sentences = ((path.name, one.sentence(path)) for path, one in states.items() if one)
    said = [f"{name}: {sentence}" for name, sentence in sentences if sentence]
    yield from said[:_NAMED]
    if len(said) > _NAMED:
        yield f"{len(said) - _NAMED} more processes did not end well"


def merged(parts: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return the results of processes as one, by the name of the tool.

    Args:
        parts: Their folders.

    Raises:
        ResultError: A file cannot be read.
    """
    having: dict[str, list[Path]] = {}
    for folder in parts:
        for path in sorted(folder.glob("*.json")):
            having.setdefault(path.stem, []).append(folder)
    found = {}
    for name, folders in having.items():
        if not is_result(results.load(folders[0] / f"{name}.json")):
            continue
        load = _Load(folders[0].parent, name)
        found[name] = merge([folder.name for folder in folders], load)
    return found


@dataclass
class _Load:
    """Reads the result of a process, of a large one its index.

    Attributes:
        folder: The folder of the run.
        name: The name of the tool.
        known: What several indexes have in common.
    """

    folder: Path
    name: str
    known: dict[str, Any] = field(default_factory=dict)

    def __call__(self, process: str) -> Merged | Mapping[str, Any]:
        path = self.folder / process / f"{self.name}.json"
        index = path.with_name(index_of(self.name))
        with suppress(OSError):
            if index.is_file():
                with index.open("rb") as file:
                    found = unpacked(file, path.stat().st_size, process, self.known)
                if found is not None:
                    return found
        content: Mapping[str, Any] = results.load(path)
        return content
