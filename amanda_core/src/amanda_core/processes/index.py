"""The index of a large result of one of many processes: its columns, so that it is merged fast.

Owns the form: three lines of JSON, of which the last is what processes that run the same operators
have in common. It is read once for all that have the same, and an index can be made again of its
result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import IO, Any

from amanda_core.processes.columns import Column
from amanda_core.processes.merging import Merged, Rows

__all__ = ["packed", "unpacked"]

_VERSION = 2
#: Most bytes of a line that are read.
_LIMIT = 1 << 28
#: Kinds of columns that are the same in most processes.
_FIXED = ("same", "empty")


def packed(content: Mapping[str, Any], size: int) -> str:
    """Return the index of a result.

    Args:
        content: Its JSON.
        size: Bytes of its file.
    """
    merged = Merged.of("", content)
    fixed = {
        name: [
            rows.keys,
            [*rows.columns],
            {n: [c.kind, c.values] for n, c in rows.columns.items() if c.kind in _FIXED},
            rows.identifying,
        ]
        for name, rows in merged.parts.items()
    }
    moving = {
        name: {
            n: [c.kind, _short(c.values)] for n, c in rows.columns.items() if c.kind not in _FIXED
        }
        for name, rows in merged.parts.items()
    }
    common = json.dumps(fixed)
    head = {
        "version": _VERSION,
        "size": size,
        "digest": hashlib.blake2b(common.encode("utf-8", "surrogatepass")).hexdigest(),
        "content": merged.content,
        "ranks": merged.ranks,
        "named": sorted(merged.named),
        "alike": merged.alike,
        "notes": [*merged.notes],
    }
    return "\n".join([json.dumps(head), json.dumps(moving), common])


def unpacked(file: IO[bytes], size: int, process: str, known: dict[str, Any]) -> Merged | None:
    """Return the result of a process; None if this is not its index.

    Args:
        file: The index, of which the last line is not read if it is known.
        size: Bytes of the file of the result.
        process: Name of the process.
        known: What was read of indexes before, to which this one is added.
    """
    try:
        head = json.loads(file.readline(_LIMIT))
        if (head["version"], head["size"]) != (_VERSION, size):
            return None
        moving = json.loads(file.readline(_LIMIT))
        digest = head["digest"]
        if digest not in known:
            known[digest] = {
                part: ([_as_key(key) for key in keys], *more)
                for part, (keys, *more) in json.loads(file.readline(_LIMIT)).items()
            }
        parts = {}
        for part, (keys, names, columns, identifying) in known[digest].items():
            both = {**columns, **moving[part]}
            found = {}
            for name in names:
                kind, values = both[name]
                if not isinstance(values, list):
                    values = [values] * len(keys)
                found[name] = Column.of(kind, values, process)
            parts[part] = Rows(keys, found, identifying).of_process(process)
        ranks = [{**row, "name": process} for row in head["ranks"]]
        notes = {note: [process] for note in head["notes"]}
        named = set(head["named"])
        return Merged(head["content"], [process], ranks, parts, named, head["alike"], notes)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _short(values: list[Any]) -> Any:
    """Return the values, or the one that all of them are."""
    return values[0] if values and values.count(values[0]) == len(values) else values


def _as_key(value: Any) -> Any:
    return tuple(map(_as_key, value)) if isinstance(value, list) else value
