"""Gradients after a reduction against the sum of those before it, and norms of gradients.

Two linear functions of each gradient are known, so that their sums over processes are those of the
sums of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from amanda_tools.replicas.recorded import Process, shape_of
from amanda_tools.replicas.result import Violation
from amanda_tools.replicas.tool import AT_NORM, AT_STEP, AT_UPDATE, OWN

__all__ = ["norms", "scales"]

#: Two linear functions of a gradient.
Sketch = tuple[float, ...]
#: How near a factor must be to one that has a name.
_NEAR = 1e-3
#: What is so small beside the largest gradient is rounding, as of a bias before a normalization.
_ROUNDING = 1e-6
#: Common types of operators that compute norms.
_NORM_TYPES = ("norm", "sqrt", "pow")


def factor_text(factor: float, most: int) -> str | None:
    """Return a factor as a number of processes, or its root; None if it is neither.

    >>> factor_text(2.0, 4), factor_text(1.4142, 2), factor_text(0.5, 2), factor_text(0.7, 2)
    ('2 or √4', '√2', '1/2', None)
    """
    found = []
    for number in range(2, most + 1):
        for text, exact in ((f"{number}", float(number)), (f"√{number}", number**0.5)):
            found += [text] if abs(factor / exact - 1) < _NEAR else []
            found += [f"1/{text}"] if abs(factor * exact - 1) < _NEAR else []
    return " or ".join(found) or None


def _holders(processes: Sequence[Process], name: str, step: int) -> list[list[Process]]:
    """Return the processes that have a weight, those with equal ones together."""
    found: dict[object, list[Process]] = {}
    for process in processes:
        row = process.reads.get(name, {}).get(step)
        if row is not None:
            key = int(process.rows["digest"][row]), process.kinds[row]
            found.setdefault(key, []).append(process)
    return list(found.values())


def _names(processes: Sequence[Process]) -> list[str]:
    return list(dict.fromkeys(name for process in processes for name in process.reads))


def scales(processes: Sequence[Process], step: int) -> Iterator[Violation]:
    """Yield the weights whose gradients have another scale than those of most weights.

    The scale is that of the gradient that the optimizer reads, to the sum of the gradients that the
    processes computed. Where they computed the same, it may be each of these, or their sum.
    """
    found: list[tuple[str, list[Process], list[float]]] = []
    least = _ROUNDING * max((_size(p, step, n) for p in processes for n in p.reads), default=0.0)
    alike: dict[tuple[str, ...], bool] = {}
    for name in _names(processes):
        for group in _holders(processes, name, step):
            own = [_sum(process, step, OWN, name) for process in group]
            after = _sum(group[0], step, AT_STEP, name)
            if after is None or len(after[1]) != 1 or None in own:
                continue
            if _size(group[0], step, name) <= least:
                continue
            distinct = {one[1]: one[0] for one in own if one is not None}
            sums = [_added(list(distinct.values()))]
            key = tuple(process.name for process in group)
            if len(group) > 1:
                alike[key] = alike.get(key, True) and len(distinct) == 1
            if len(distinct) == 1:
                sums.append(tuple(len(group) * x for x in sums[0]))
            ratios = [ratio for total in sums if (ratio := _ratio(after[0], total)) is not None]
            if ratios:
                found.append((name, group, ratios))
    # Where processes compute all gradients alike, none of these is a part of a sum.
    found = [
        (name, group, ratios[:1] if alike.get(tuple(p.name for p in group)) else ratios)
        for name, group, ratios in found
    ]
    # A name counts once: experts are in many processes, each with weights of its own.
    usual = _usual([*{name: ratios for name, _, ratios in found}.values()])
    if usual is None:
        return
    for name, group, ratios in found:
        if any(abs(ratio / usual - 1) < _NEAR for ratio in ratios):
            continue
        text = factor_text(ratios[0] / usual, len(processes))
        if text is not None:
            row = group[0].sketches[step, AT_STEP][name][-1]
            yield group[0].violation(
                "scale",
                [process.name for process in group[1:]],
                row,
                f"It is {text} times as large as it is in relation to the gradients of the other "
                "weights: the processes reduce it in another way.",
                f"the gradient of weight {name.partition(':')[2]!r}",
                factor=ratios[0] / usual,
            )


def _size(process: Process, step: int, name: str) -> float:
    """Return the norm of the gradient that the optimizer reads."""
    row = process.gradients.get((step, AT_STEP), {}).get(name)
    return 0.0 if row is None else float(process.rows["norm"][row])


def _sum(process: Process, step: int, at: int, name: str) -> tuple[Sketch, tuple[int, ...]] | None:
    """Return the sum of the sketches of a gradient, and their digests; None without any."""
    rows = process.sketches.get((step, at), {}).get(name, [])
    weight = process.reads[name][step]
    if not rows or any(
        shape_of(process.kinds[row]) != shape_of(process.kinds[weight]) for row in rows
    ):
        return None
    sketches = [(float(process.rows["norm"][r]), float(process.rows["largest"][r])) for r in rows]
    return _added(sketches), tuple(int(digest) for digest in process.rows["digest"][rows])


def _added(sketches: Sequence[Sketch]) -> Sketch:
    return tuple(sum(parts) for parts in zip(*sketches, strict=True))


def _ratio(after: Sketch, before: Sketch) -> float | None:
    """Return by which factor a sketch is larger; None if it is not another one times a factor."""
    square = sum(x * x for x in before)
    size = sum(x * x for x in after)
    if not (0 < square < float("inf") and 0 < size < float("inf")):
        return None
    ratio = sum(x * y for x, y in zip(after, before, strict=True)) / square
    rest = sum((x - ratio * y) ** 2 for x, y in zip(after, before, strict=True))
    return ratio if rest < (_NEAR**2) * size and ratio > 0 else None


def _usual(found: Sequence[Sequence[float]]) -> float | None:
    """Return the ratio that more than half of the weights have."""
    best: tuple[int, float | None] = 0, None
    for ratio in {ratio for ratios in found for ratio in ratios}:
        count = sum(any(abs(one / ratio - 1) < _NEAR for one in ratios) for ratios in found)
        if count > best[0]:
            best = count, ratio
    return best[1] if 2 * best[0] > len(found) > 1 else None


def norms(processes: Sequence[Process], step: int) -> Iterator[Violation]:
    """Yield the norm of all gradients that the program computes, if it is wrong by a factor."""
    for process in processes:
        row = _norm_row(process, step)
        if row is None:
            continue
        order = process.rows["order"][row]
        at = [key for key in (AT_NORM, AT_STEP) if _is_before(process, step, key, order)]
        true = _whole_norm(processes, step, at[0]) if at else None
        if not true:
            continue
        factor = float(process.rows["norm"][row]) / true
        text = factor_text(factor, len(processes))
        if text is not None:
            op = process.run.ops[process.rows["op"][row]]
            yield process.violation(
                "norm",
                [one.name for one in processes if one is not process],
                row,
                f"It is {text} times the norm of the whole gradient, which is {true:.6g}: each "
                "gradient that several processes have counts once.",
                f"the norm of the gradients in op {op.name!r}",
                factor=factor,
            )
            return


def _is_before(process: Process, step: int, at: int, order: int) -> bool:
    rows = process.gradients.get((step, at), {})
    return bool(rows) and all(process.rows["order"][row] <= order for row in rows.values())


def _norm_row(process: Process, step: int) -> int | None:
    """Return the last number that may be a norm of gradients, before the weights are updated."""
    begin = process.first_backward.get(step)
    read = (process.gradients.get((step, at)) for at in (AT_UPDATE, AT_STEP))
    update = next((rows for rows in read if rows), {})
    if begin is None or not update:
        return None
    end = min(process.rows["order"][row] for row in update.values())
    found = None
    for row in process.scalars(step):
        op = process.run.ops[process.rows["op"][row]]
        is_norm = op.word in _NORM_TYPES or "norm" in op.type
        if is_norm and begin < process.rows["order"][row] < end:
            found = row
    return found


def _whole_norm(processes: Sequence[Process], step: int, at: int) -> float | None:
    """Return the norm of all gradients; None if the processes do not agree on one."""
    square = 0.0
    for name in _names(processes):
        for group in _holders(processes, name, step):
            rows = [process.gradients.get((step, at), {}).get(name) for process in group]
            known = [row for row in rows if row is not None]
            if len(known) != len(group):
                continue
            digests = {
                int(process.rows["digest"][row]) for process, row in zip(group, known, strict=True)
            }
            if len(digests) != 1:
                return None
            square += float(group[0].rows["norm"][known[0]]) ** 2
    return square**0.5 or None
