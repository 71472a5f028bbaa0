"""One result of many: what the processes of a run have each written, as one result of its form.

Owns which rows belong together. Results are read one after another and none is kept, so that a run
may have thousands of processes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from operator import itemgetter
from typing import Any

from amanda_core.processes.columns import Column, Kind, kind_of

__all__ = ["Merged", "Rows", "merge"]

#: What distinguishes rows: the first of these that all rows of a part have.
_KEYS = (("namespace", "id", "phase"), ("namespace", "id"), ("number",), ("name",))
#: Times that say how long a row took, the best first.
_MAIN = ("self", "wall", "total", "forward")
#: Parts that are about the result, and not figures.
_ASIDE = ("format", "units", "charts", "notes", "merge")
#: Charts that are drawn of rows, and mean the same of merged ones.
_CHARTS = ("icicle", "bars", "roofline")
#: From how many processes on it is worth while to read them in several processes.
_MANY = 64
_NOTES = 20


@dataclass
class Rows:
    """The rows of one part, of some processes.

    Attributes:
        keys: What distinguishes the rows.
        columns: The fields by their names.
    """

    keys: list[Any]
    columns: dict[str, Column] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        rows: Sequence[Mapping[str, Any]],
        keys: list[Any],
        kind: Callable[[str, float], Kind],
        process: str,
    ) -> Rows:
        """Return the rows of one process."""
        found = cls(keys)
        names, alike = list(rows[0]), len(rows) * len(rows[0]) == sum(map(len, rows))
        if not alike:  # Rows have fields of their own.
            names = list(dict.fromkeys(chain.from_iterable(rows)))
        main = next((name for name in _MAIN if name in names), None)
        for name in names:
            try:
                values = list(map(itemgetter(name), rows))
            except KeyError:
                values = [row.get(name) for row in rows]
            of = _kind(name, values, kind)
            if of == "slowest" and name != main:
                of = "max"
            found.columns[name] = Column.of(of, values, process)
        return found

    def absorb(self, other: Rows) -> None:
        """Merge the rows of other processes into these."""
        if self.keys != other.keys:  # They ran other operators, as stages of a pipeline do.
            known = {key: position for position, key in enumerate(other.keys)}
            mine = set(self.keys)
            keys = [*self.keys, *(key for key in other.keys if key not in mine)]
            here = [*range(len(self.keys)), *[None] * (len(keys) - len(self.keys))]
            self.columns = {name: one.at(here) for name, one in self.columns.items()}
            there = [known.get(key) for key in keys]
            columns = {name: one.at(there) for name, one in other.columns.items()}
            self.keys, other = keys, Rows(keys, columns)
        for name, column in other.columns.items():
            if name in self.columns:
                self.columns[name].absorb(column)
            else:
                self.columns[name] = column

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the merged rows."""
        shown = {name: column.shown() for name, column in self.columns.items()}
        times = [name for name in _MAIN if name in shown and self.columns[name].who]
        if times:
            main = self.columns[times[0]]
            shown |= {"slowest": main.who, "skew": main.skew()}
        if not shown:  # Such as an empty part.
            yield from ({} for _ in self.keys)
        for values in zip(*shown.values(), strict=True):
            yield dict(zip(shown, values, strict=True))


class _Kinds:
    """The kinds of the fields of a result."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        units, said = content.get("units"), content.get("merge")
        self._units = units if isinstance(units, dict) else {}
        self._said: Mapping[str, Kind] = said if isinstance(said, dict) else {}

    def __call__(self, name: str, value: float) -> Kind:
        return self._said.get(name) or kind_of(name, value, self._units)

    def in_part(self, part: str) -> Callable[[str, float], Kind]:
        """Return the kinds of single values by their names in a part."""
        units = self._units
        return lambda name, value: (
            self(name, value)
            if name in units
            else kind_of(name, value, {name: units.get(f"{part}.*", "")})
        )


@dataclass
class Merged:
    """The result of some processes as one.

    Attributes:
        content: What is the same in all of them: format, units, charts.
        processes: The names of the processes.
        ranks: Of each, its single values.
        parts: The rows of each part.
        alike: Parts that are not rows, if they are the same in all processes.
        notes: Notes of the results, and the processes that have each.
    """

    content: dict[str, Any]
    processes: list[str] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    parts: dict[str, Rows] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    alike: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, process: str, content: Mapping[str, Any]) -> Merged:
        """Return the result of one process."""
        kinds = _Kinds(content)
        found = cls({name: content[name] for name in _ASIDE if name in content}, [process])
        single = {}
        for name, value in content.items():
            if name in _ASIDE:
                continue
            if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
                found.parts[name] = Rows.of(value, _keys(value), kinds, process)
            elif isinstance(value, dict) and value and all(map(_is_row, value.values())):
                rows = Rows.of([*value.values()], [*value], kinds, process)
                found.parts[name] = rows
                found.named.add(name)
            elif isinstance(value, dict):
                found.parts[name] = Rows.of([value], [""], kinds.in_part(name), process)
            elif isinstance(value, list):
                found.alike[name] = value
            else:
                single[name] = value
        found.parts[""] = Rows.of([single], [""], kinds, process)
        total = content.get("total")
        totals = {f"total {n}": one for n, one in total.items()} if isinstance(total, dict) else {}
        told = {
            n: v for n, v in single.items() if isinstance(v, str) or _kind(n, [v], kinds) != "same"
        }
        found.ranks.append({"name": process, **told, **totals})
        for note in content.get("notes") or ():
            found.notes[str(note)] = [process]
        return found

    def absorb(self, other: Merged) -> None:
        """Merge the results of other processes into this one."""
        self.processes += other.processes
        self.ranks += other.ranks
        for name, rows in other.parts.items():
            if name in self.parts:
                self.parts[name].absorb(rows)
            else:
                self.parts[name] = rows
        self.named |= other.named
        self.alike = {
            name: value for name, value in self.alike.items() if other.alike.get(name) == value
        }
        for note, having in other.notes.items():
            self.notes[note] = self.notes.get(note, []) + having

    def result(self) -> dict[str, Any]:
        """Return a result of the form of each, with a part ``ranks`` that has a row for each."""
        content, parts = dict(self.content), dict(self.parts)
        charts = content.pop("charts", [])
        content |= next(parts.pop("").rows())
        texts = {n for row in self.ranks for n, value in row.items() if isinstance(value, str)}
        known = {n for n in texts if len({row.get(n) for row in self.ranks}) < 2}
        ranks = [{n: value for n, value in row.items() if n not in known} for row in self.ranks]
        content |= {"ranks": ranks, **self.alike}
        for name, rows in parts.items():
            merged = [*rows.rows()]
            if name in self.named:
                content[name] = dict(zip(rows.keys, merged, strict=True))
            elif rows.keys == [""]:
                content[name] = merged[0]
            else:
                content[name] = merged
        notes = [
            note
            if len(having) == len(self.processes)
            else f"{', '.join(having[:3])}{' and others' if len(having) > 3 else ''}: {note}"
            for note, having in self.notes.items()
        ]
        kept = [one for one in charts if isinstance(one, dict) and one.get("kind") in _CHARTS]
        return {**content, "notes": notes[:_NOTES], "charts": kept}


#: Reads the result of a process: its JSON, or what an index has of it.
Load = Callable[[str], "Merged | Mapping[str, Any]"]


def merge(processes: Sequence[str], load: Load) -> dict[str, Any]:
    """Return the results of processes as one.

    Args:
        processes: Their names.
        load: Reads the result of one; a function that can be pickled.
    """
    workers = min(os.cpu_count() or 1, len(processes) // _MANY)
    if workers < 2:
        return _merged(processes, load).result()
    size = -(-len(processes) // workers)
    chunks = [processes[i : i + size] for i in range(0, len(processes), size)]
    # Late, since every command imports this module, and these import many others.
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(len(chunks), get_context("spawn")) as pool:
        first, *others = pool.map(partial(_merged, load=load), chunks)
    for one in others:
        first.absorb(one)
    return first.result()


def _merged(processes: Sequence[str], load: Load) -> Merged:
    with _without_collection():
        first, *others = processes
        found = _one(first, load)
        for process in others:
            found.absorb(_one(process, load))
        return found


def _one(process: str, load: Load) -> Merged:
    found = load(process)
    return found if isinstance(found, Merged) else Merged.of(process, found)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep the collector from looking at millions of rows that are in no circle."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _kind(name: str, values: list[Any], kind: Callable[[str, float], Kind]) -> Kind:
    types = set(map(type, values)) - {type(None)}
    if not types:
        return "empty"
    return kind(name, 1.5 if float in types else 1) if types <= {int, float} else "same"


def _is_row(value: object) -> bool:
    return isinstance(value, dict) and not any(isinstance(one, dict) for one in value.values())


def _keys(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return what distinguishes the rows, which is their number if nothing else does."""
    for names in _KEYS:
        try:
            keys = list(map(itemgetter(*names), rows))
            unique = set(keys)
        except (KeyError, TypeError):
            continue
        if len(unique) == len(keys):
            return keys
        seen: dict[Any, Iterator[int]] = {}
        return [(key, next(seen.setdefault(key, count()))) for key in keys]
    return [*range(len(rows))]
