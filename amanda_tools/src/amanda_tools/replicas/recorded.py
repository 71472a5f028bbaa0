"""`Process`: the record of one process by weight and step, for comparison with other processes."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

from amanda_tools.fingerprint.files import (
    CONSTANT,
    GRADIENT,
    INPUT,
    OUTPUT,
    SKETCH,
    UNREADABLE,
    UNWRITTEN,
    Fingerprinted,
)
from amanda_tools.replicas.result import Kind, Violation

__all__ = ["Process", "is_partial", "is_replica", "shape_of", "usable"]

_SCALAR = re.compile(r"(b?float\w*)\[\]")


class Process:
    """The record of one process.

    Args:
        name: Its name, such as ``rank0``.
        run: Its rows.

    Attributes:
        kinds: Dtype, shape and placement of each row, as text.
        unreadable: Number of reads of weights, and of gradients, without a digest.
        is_weight: Which rows are of a weight that an operator of the forward pass reads.
    """

    def __init__(self, name: str, run: Fingerprinted) -> None:
        import numpy

        self.name, self.run, self.rows = name, run, run.rows
        types = numpy.asarray([*run.types, ""], object)
        self.kinds = types[numpy.minimum(run.rows["type"], len(types) - 1)]
        self.is_weight = numpy.zeros(len(run.rows), bool)
        #: Weight -> step -> the row of its first read in that step.
        self.reads: dict[str, dict[int, int]] = {}
        unread = run.rows["flags"] & UNREADABLE != 0
        self.unreadable = int((unread & (run.rows["what"] == GRADIENT)).sum())
        inputs = run.rows["what"] == INPUT
        for number, weights in enumerate(run.weights):
            if not weights:
                continue
            own = numpy.flatnonzero(inputs & (run.rows["op"] == number))
            rows = run.rows[own]
            for (position, item), name in weights.items():
                of = own[(rows["position"] == position) & (rows["item"] == item)]
                self.is_weight[of] = True
                self.unreadable += int(unread[of].sum())
                of = of[~unread[of]]
                if run.ops[number].zone != "model" or not len(of):
                    continue
                first = self.reads.setdefault(name, {})
                for row in of.tolist():
                    first.setdefault(int(run.rows["step"][row]), row)

    @property
    def groups(self) -> dict[str, int]:
        """Return how many processes train each model together, as its wrappers say."""
        return dict(self.run.about.get("groups", {}))

    @property
    def processes(self) -> int:
        """Return how many processes ran the program."""
        return int(self.run.about.get("processes", 1))

    @property
    def steps(self) -> list[int]:
        """Return the numbers of the steps that were recorded."""
        import numpy

        return [int(step) for step in numpy.unique(self.rows["step"])]

    @cached_property
    def gradients(self) -> dict[tuple[int, int], dict[str, int]]:
        """Return the rows of gradients by step and point, then by weight."""
        return {key: {n: rows[-1] for n, rows in of.items()} for key, of in self._of(GRADIENT)}

    @cached_property
    def sketches(self) -> dict[tuple[int, int], dict[str, list[int]]]:
        """Return the rows of sketches by step and point, then by weight."""
        return dict(self._of(SKETCH))

    def _of(self, what: int) -> list[tuple[tuple[int, int], dict[str, list[int]]]]:
        import numpy

        found: dict[tuple[int, int], dict[str, list[int]]] = {}
        has_digest = self.rows["flags"] & UNREADABLE == 0
        for row in numpy.flatnonzero((self.rows["what"] == what) & has_digest).tolist():
            one = self.rows[row]
            by_name = found.setdefault((int(one["step"]), int(one["position"])), {})
            by_name.setdefault(self.run.ops[one["op"]].name, []).append(row)
        return list(found.items())

    @cached_property
    def first_backward(self) -> dict[int, int]:
        """Return the order of the first backward operator of each step."""
        import numpy

        backward = numpy.asarray([op.phase == "backward" for op in self.run.ops] or [False])
        found: dict[int, int] = {}
        for row in self.rows[backward[self.rows["op"]]]:
            found.setdefault(int(row["step"]), int(row["order"]))
        return found

    def scalars(self, step: int) -> list[int]:
        """Return the rows of numbers that operators of the forward pass wrote in a step."""
        import numpy

        rows = self.rows
        found = numpy.flatnonzero((rows["step"] == step) & (rows["what"] == OUTPUT))
        return [
            row
            for row in found.tolist()
            if _SCALAR.fullmatch(self.kinds[row])
            and self.run.ops[rows["op"][row]].phase == "forward"
        ]

    def is_constant(self, row: int) -> bool:
        """Return True if all elements of a value are equal."""
        return bool(self.rows["flags"][row] & CONSTANT)

    def violation(
        self, kind: Kind, others: list[str], row: int, why: str, what: str = "", **more: Any
    ) -> Violation:
        """Return a violation at a row of this process."""
        one = self.rows[row]
        op = self.run.ops[one["op"]]
        is_op = op.zone != "state"
        return Violation(
            kind,
            what or self.run.place_of(one),
            [self.name, *others],
            int(one["step"]),
            op.name if is_op else None,
            op.module,
            op.source,
            int(one["order"]),
            why,
            **more,
        )


def usable(rows: Any) -> Any:
    """Return which rows are of values that an operator read or wrote and that have a digest."""
    tensors = (rows["what"] == INPUT) | (rows["what"] == OUTPUT)
    return tensors & (rows["flags"] & (UNWRITTEN | UNREADABLE) == 0)


def is_replica(kind: str) -> bool:
    """Return True if a type says that some processes have the same value.

    >>> is_replica("float32[2]"), is_replica(
    ...     "float32[2]Placement(shape=(2,), parts=(slice(0, 2, None),), partial='', ranks=(0, 1))"
    ... )
    (False, True)
    """
    return "partial=''" in kind and "parts=None" not in kind


def is_partial(kind: str) -> bool:
    """Return True if a type says that the value is the sum of what processes have, or the like.

    >>> is_partial("float32[2]Placement(shape=(2,), parts=None, partial='sum', ranks=(0, 1))")
    True
    """
    return "partial='" in kind and "partial=''" not in kind


def shape_of(kind: str) -> str:
    """Return the shape in a type, as text.

    >>> shape_of("float32[2,3]")
    '[2,3]'
    """
    return "[" + kind.partition("[")[2].partition("]")[0] + "]"
