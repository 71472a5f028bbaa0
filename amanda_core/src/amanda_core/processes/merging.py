"""One result of many: what the processes of a run have each written, as one result of its form.

Owns which rows belong together. Results are read one after another and none is kept, so that a run
may have thousands of processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, get_args

from amanda_core.processes.columns import Column, Kind, Relation, kind_of
from amanda_core.runtime.collection import without_collection

__all__ = ["Merged", "Rows", "merge"]

#: What distinguishes rows: the first of these that do.
_KEYS = (
    ("namespace", "id", "phase"),
    ("namespace", "id"),
    ("number",),
    ("step",),
    ("name",),
    ("op",),
    ("name", "op"),
)
#: Parts of one row that are about all parts of a model.
_TOTALS = ("", "total")
#: What names the process of a row that belongs to it alone, such as an event.
PROCESS = "process"
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
        identifying: Names of the fields that make the keys. None if nothing distinguishes the rows
            of a process, so that no two rows of different processes are about the same thing.
    """

    keys: list[Any]
    columns: dict[str, Column] = field(default_factory=dict)
    identifying: Sequence[str] | None = ()

    @classmethod
    def of(
        cls,
        rows: Sequence[Mapping[str, Any]],
        keys: list[Any],
        kind: Callable[[str, float], Kind],
        process: str,
        identifying: Sequence[str] | None = (),
    ) -> Rows:
        """Return the rows of one process."""
        found = cls(keys, identifying=identifying)
        names, alike = list(rows[0]), len(rows) * len(rows[0]) == sum(map(len, rows))
        if not alike:  # Rows have fields of their own.
            names = list(dict.fromkeys(chain.from_iterable(rows)))
        main = next((name for name in _MAIN if name in names), None)
        for name in names:
            try:
                values = list(map(itemgetter(name), rows))
            except KeyError:
                values = [row.get(name) for row in rows]
            of = "same" if name in (identifying or ()) else _kind(name, values, kind)
            if of == "slowest" and (name != main or identifying is None):
                of = "max"
            found.columns[name] = Column.of(of, values, process)
        return found.of_process(process)

    def of_process(self, process: str) -> Rows:
        """Return the rows with the name of their process where they are about it alone."""
        if self.identifying is not None:
            return self
        columns = {PROCESS: Column.of("same", [process] * len(self.keys), process)}
        columns |= {name: one for name, one in self.columns.items() if name != PROCESS}
        return Rows([(process, number) for number in range(len(self.keys))], columns, None)

    def absorb(self, other: Rows, relation: Relation = "alike") -> None:
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
                self.columns[name].absorb(column, relation)
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
        self.said: Mapping[str, Any] = said if isinstance(said, dict) else {}

    def __call__(self, name: str, value: float) -> Kind:
        return self._of(self.said.get(name)) or kind_of(name, value, self._units)

    @staticmethod
    def _of(said: object) -> Kind | None:
        return said if said in get_args(Kind) else None  # type: ignore[return-value]

    def in_part(self, part: str) -> Callable[[str, float], Kind]:
        """Return the kinds of single values by their names in a part."""
        units, of_all = self._units, self._of(self.said.get(f"{part}.*") or self.said.get(part))
        unit = str(units.get(f"{part}.*", units.get(part, "")))
        return lambda name, value: (
            self(name, value)
            if name in units or name in self.said
            else of_all or kind_of(name, value, {name: unit})
        )

    def keys(self, part: str, rows: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
        """Return what distinguishes rows, and of which fields that is; see `Rows.identifying`."""
        said = self.said.get(part)
        if isinstance(said, list):
            return _keys(rows, (tuple(said),) if said else ())
        return _keys(rows, _KEYS)


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
                keys, identifying = kinds.keys(name, value)
                found.parts[name] = Rows.of(value, keys, kinds, process, identifying)
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
        relation = self._relation(other)
        for name, rows in other.parts.items():
            if name in self.parts:
                self.parts[name].absorb(rows, relation if name in _TOTALS else "alike")
            else:
                self.parts[name] = rows
        self.named |= other.named
        self.alike = {
            name: value for name, value in self.alike.items() if other.alike.get(name) == value
        }
        for note, having in other.notes.items():
            self.notes[note] = self.notes.get(note, []) + having

    def _relation(self, other: Merged) -> Relation:
        """Return how what other processes have of the model relates to what these have."""
        mine, its = self._held(), other._held()
        if mine == its:
            return "alike"
        here, there = set(chain(*mine)), set(chain(*its))
        if there <= here:
            return "within"
        if here <= there:
            return "around"
        return "mixed" if here & there else "apart"

    def _held(self) -> list[list[Any]]:
        """Return the keys of what processes have of the model: of parts that are shared."""
        said = _Kinds(self.content).said
        found: list[list[Any]] = []
        for name, rows in self.parts.items():
            if said.get(name) == "shared" and name not in _TOTALS:
                found.append([*rows.columns] if rows.keys == [""] else rows.keys)
        return found

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
    with without_collection():
        first, *others = processes
        found = _one(first, load)
        for process in others:
            found.absorb(_one(process, load))
        return found


def _one(process: str, load: Load) -> Merged:
    found = load(process)
    return found if isinstance(found, Merged) else Merged.of(process, found)


def _kind(name: str, values: list[Any], kind: Callable[[str, float], Kind]) -> Kind:
    types = set(map(type, values)) - {type(None)}
    if not types:
        return "empty"
    return kind(name, 1.5 if float in types else 1) if types <= {int, float} else "same"


def _is_row(value: object) -> bool:
    return isinstance(value, dict) and not any(isinstance(one, dict) for one in value.values())


def _keys(
    rows: Sequence[Mapping[str, Any]], candidates: Sequence[tuple[str, ...]]
) -> tuple[list[Any], Sequence[str] | None]:
    """Return what distinguishes rows, and the names of these fields; None if nothing does."""
    for names in candidates:
        try:
            keys = list(map(itemgetter(*names), rows))
            if len(set(keys)) == len(keys):
                return keys, names
        except (KeyError, TypeError):
            continue
    return [*range(len(rows))], None
