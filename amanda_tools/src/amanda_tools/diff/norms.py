"""Created errors by norms alone: what fingerprints show of runs whose precision or mode differs.

Norms do not show how far two tensors are apart, only how far at least: not less than the difference
of their 2-norms, and not less than that of their largest magnitudes. Values with equal norms may
differ, such as permuted ones.
"""

from __future__ import annotations

import math
from typing import Any

from amanda_tools.diff.compared import Compared
from amanda_tools.diff.created import Hidden, Judged, execution_of, judge
from amanda_tools.diff.numbers import Difference, epsilon, is_huge
from amanda_tools.fingerprint.files import INPUT, NOBODY, Fingerprinted

__all__ = ["has_norms", "judge_norms"]

#: How many times the mean of the elements the largest one is.
_SPREAD = 4.0
#: Relative error of a norm in a record, of 32 bits and summed in them, and that of another.
_RESOLUTION = 2.0**-22


def has_norms(run: Fingerprinted) -> bool:
    """Return True if norms were recorded."""
    return bool(run.rows["norm"].any())


def judge_norms(one: Fingerprinted, other: Fingerprinted, mine: Any, theirs: Any) -> Judged:
    """Judge the executions of two runs by the norms of what they read and wrote.

    Args:
        one: The first run.
        other: The second run.
        mine: Places of the values that are compared among the first run's rows.
        theirs: Places of their counterparts.
    """
    pairs = list(zip(one.rows[mine], other.rows[theirs], strict=True))
    compared = [_compared(one, other, row, there) for row, there in pairs]
    hidden = Hidden(_errors(compared, [row for row, _ in pairs]), _shown)
    judged = [
        value
        for value, pair in zip(compared, pairs, strict=True)
        if not all(map(_is_masked, pair, value.dtypes))
    ]
    return judge(judged, hidden)


def _shown(value: Compared, error: float) -> float:
    """Return how much norms show of an error that has nothing to do with the values.

    Where ``n`` elements have independent errors, the norm changes by about the error divided by the
    square root of ``n``, and by half of its square. The largest element is within a few times the
    mean, and so is its error.
    """
    count = max(math.prod(value.shapes[0]), 1)
    return error * min(1.0, _SPREAD / math.sqrt(count) + error / 2)


def _is_masked(row: Any, dtype: str) -> bool:
    """Return True if the norms of a value say nothing: a mask may have set elements of it."""
    largest = float(row["largest"])
    return not math.isfinite(float(row["norm"]) + largest) or bool(is_huge(largest, dtype))


def _compared(one: Fingerprinted, other: Fingerprinted, row: Any, there: Any) -> Compared:
    """Return a value of both runs with the least distance that their norms allow."""
    types = [_parts(one.types[row["type"]]), _parts(other.types[there["type"]])]
    (dtype, shape), (dtype_b, shape_b) = types
    difference: Difference | None = None
    if shape == shape_b:
        equal = bool(row["digest"] == there["digest"]) and dtype == dtype_b
        norms = float(row["norm"]), float(there["norm"])
        largest = float(row["largest"]), float(there["largest"])
        apart: float | None = None
        if all(map(math.isfinite, (*norms, *largest))) and epsilon(dtype) and epsilon(dtype_b):
            apart = max(_apart(*norms), _apart(*largest))
        difference = Difference(equal, equal, apart=apart, norm=max(norms))
    backward = one.ops[row["op"]].phase == "backward"
    what = ("grad_output", "grad_input") if backward else ("input", "output")
    names = one.inputs[row["op"]][int(row["position"]) :] if row["what"] == INPUT else []
    return Compared(
        one.ops[row["op"]],
        other.ops[there["op"]],
        what[int(row["what"] != INPUT)],
        str(row["position"]),
        int(row["step"]),
        int(row["execution"]),
        difference,
        [shape, shape_b],
        [dtype, dtype_b],
        weight=names[0] if names else None,
    )


def _apart(one: float, other: float) -> float:
    """Return how far two norms are apart at least, since both are rounded.

    >>> _apart(3.0, 1.0) == 2.0 - 3 * _RESOLUTION, _apart(1.0, 1.0 + 2**-23)
    (True, 0.0)
    """
    return max(abs(one - other) - _RESOLUTION * max(one, other), 0.0)


def _parts(text: str) -> tuple[str, list[int]]:
    """Return the dtype and the shape of a type's text; lengths that are not known are 0.

    >>> _parts("float32[2,3]cpu")
    ('float32', [2, 3])
    """
    dtype, _, rest = text.partition("[")
    lengths = rest.partition("]")[0].split(",")
    return dtype, [int(one) if one.isdecimal() else 0 for one in lengths if one]


def _errors(compared: list[Compared], rows: list[Any]) -> dict[object, float]:
    """Return the error of what each execution read that rounding before it explains, and that the
    norms of what it read may hide.

    Roundings are independent, so that their squares are added from operator to operator.
    """
    found: dict[object, float] = {}
    #: Order of the rows of what an execution wrote -> its error.
    written: dict[int, float] = {}
    #: Step and name of a forward operator -> error of what it read and wrote.
    forward: dict[tuple[int, str], float] = {}
    #: Step -> largest error of a gradient so far. No operator adds gradients of several operators.
    gradients: dict[int, float] = {}
    for value, row in zip(compared, rows, strict=True):
        key = execution_of(value)
        if row["what"] == INPUT:
            producer = int(row["producer"])
            errors = [found.get(key, 0.0), written.get(producer, 0.0)]
            if value.what == "grad_output":
                errors.append(forward.get((value.step, getattr(value.a, "forward", "")), 0.0))
                errors.append(gradients.get(value.step, 0.0) if producer == NOBODY else 0.0)
            found[key] = max(errors)
            continue
        # The mean of a rounding is about a quarter of the distance of two numbers.
        rounding = max(epsilon(dtype) or 0.0 for dtype in value.dtypes) / 4
        error = math.hypot(found.get(key, 0.0), rounding)
        written[int(row["order"])] = max(written.get(int(row["order"]), 0.0), error)
        if value.what == "grad_input":
            gradients[value.step] = max(gradients.get(value.step, 0.0), error)
        else:
            place = value.step, value.a.name
            forward[place] = max(forward.get(place, 0.0), error)
    return found
