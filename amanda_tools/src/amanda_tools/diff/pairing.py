"""Which values of two fingerprints correspond: by operator, step, execution and place.

Operators correspond by name, else by the order of their types.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from amanda_tools.diff.align import corresponding
from amanda_tools.fingerprint.files import (
    INPUT,
    LAST_ITEM,
    LAST_POSITION,
    NOBODY,
    UNWRITTEN,
    Fingerprinted,
    digest_of,
)
from amanda_tools.kit.operators.entries import EitherWayOp

__all__ = ["counterparts", "paired"]


def paired(one: Fingerprinted, other: Fingerprinted) -> tuple[Any, Any]:
    """Return the indices of the rows that both have, in the order of the first."""
    import numpy

    rows, others = one.rows, other.rows
    renumbered = numpy.full(max(len(other.ops), 1), NOBODY, numpy.uint32)
    for number, there in counterparts(one.ops, other.ops).items():
        renumbered[there] = number
    ops = rows["op"], renumbered[others["op"]]
    threaded = _in_threads(rows, ops[0]) | _in_threads(others, ops[1])
    keys = [_keys(rows, ops[0], threaded), _keys(others, ops[1], threaded)]
    keep = numpy.flatnonzero(ops[1] != NOBODY)
    together = numpy.concatenate([keys[0], keys[1][keep]])
    _, numbers = numpy.unique(together, return_inverse=True)
    mine, theirs = numbers[: len(rows)], numbers[len(rows) :]
    place = numpy.full(len(together) + 1, -1, numpy.int64)
    place[theirs] = keep
    matched = place[mine]
    found = numpy.flatnonzero(matched >= 0)
    return found, matched[found]


def counterparts(first: Sequence[EitherWayOp], second: Sequence[EitherWayOp]) -> dict[int, int]:
    """Map the operators of one run to those of another: by name, else by their order.

    The last is an alignment of the sequences of types, so that a renamed or inserted operator
    shifts nothing after it.
    """
    found = corresponding(
        first, second, exact=lambda op: (op.phase, op.id, op.type), shapes=lambda op: None
    )
    taken = set(found.values())
    mine = [number for number in range(len(first)) if number not in found]
    theirs = [number for number in range(len(second)) if number not in taken]
    words, others = (
        [(ops[n].phase, ops[n].zone, ops[n].kind) for n in numbers]
        for ops, numbers in ((first, mine), (second, theirs))
    )
    matcher = difflib.SequenceMatcher(None, words, others, autojunk=False)
    for block in matcher.get_matching_blocks():
        for offset in range(block.size):
            found[mine[block.a + offset]] = theirs[block.b + offset]
    return found


def _keys(rows: Any, ops: Any, threaded: set[int]) -> Any:
    """Return a key for each row that is the same in both runs: its operator, step, execution in
    that step, and place.

    Args:
        rows: The rows.
        ops: Number of the operator of each, as in the first run.
        threaded: Operators and steps whose executions were in several threads.
    """
    import numpy

    keys = numpy.empty(len(rows), [("op", "<u8"), ("execution", "<u8"), ("place", "<u8")])
    keys["op"] = _ops_and_steps(rows, ops)
    # More executions in one step shift nothing in the next one.
    _, group = numpy.unique(keys["op"], return_inverse=True)
    first = numpy.full(len(rows), NOBODY, numpy.uint32)
    numpy.minimum.at(first, group, rows["execution"])
    keys["execution"] = rows["execution"] - first[group]
    for op in sorted(threaded):
        _number_by_inputs(rows, numpy.flatnonzero(keys["op"] == op), keys)
    place = rows["position"].astype(numpy.uint64) << numpy.uint64(16) | rows["item"]
    keys["place"] = rows["what"].astype(numpy.uint64) << numpy.uint64(32) | place
    crowded = (rows["position"] == LAST_POSITION) | (rows["item"] == LAST_ITEM)
    if len(places := numpy.flatnonzero(crowded)):
        _, begin, of = numpy.unique(keys[places], return_index=True, return_inverse=True)
        # The values of one place are next to one another.
        nth = (numpy.arange(len(places)) - begin[of]).astype(numpy.uint64)
        keys["place"][places] |= nth << numpy.uint64(35)
    return keys


def _ops_and_steps(rows: Any, ops: Any) -> Any:
    import numpy

    return ops.astype(numpy.uint64) << numpy.uint64(32) | rows["step"]


def _in_threads(rows: Any, ops: Any) -> set[int]:
    """Return the operators and steps whose executions were in more than one thread."""
    import numpy

    found, group = numpy.unique(_ops_and_steps(rows, ops), return_inverse=True)
    several = numpy.ones(len(found), bool)
    for name in ("thread", "execution"):
        lowest = numpy.full(len(found), NOBODY, numpy.uint32)
        highest = numpy.zeros(len(found), numpy.uint32)
        numpy.minimum.at(lowest, group, rows[name])
        numpy.maximum.at(highest, group, rows[name])
        several &= lowest != highest
    return {int(one) for one in found[several] if one >> numpy.uint64(32) != NOBODY}


def _number_by_inputs(rows: Any, places: Any, keys: Any) -> None:
    """Give the executions of an operator numbers by what they read.

    Threads of a pool take their tasks in another order in each run.
    """
    inputs: dict[int, list[tuple[int, ...]]] = {}
    for place in places.tolist():
        row = rows[place]
        read = inputs.setdefault(int(row["execution"]), [])
        if row["what"] == INPUT and not row["flags"] & UNWRITTEN:
            read.append((int(row["position"]), int(row["item"]), int(row["digest"])))
    seen: dict[tuple[tuple[int, ...], ...], int] = {}
    numbers = {}
    for execution, read in inputs.items():
        times = seen[tuple(read)] = seen.get(tuple(read), -1) + 1
        numbers[execution] = digest_of(repr((read, times)).encode())
    for place in places.tolist():
        keys["execution"][place] = numbers[int(rows["execution"][place])]
