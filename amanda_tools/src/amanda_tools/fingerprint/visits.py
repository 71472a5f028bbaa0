"""Digests of what modules read and wrote, or of all values of a step, instead of each value.

A visit is a sequence of executions of operators in one module, one after another in one thread.
Owns the digests of visits and their sum; `tool` decides which values belong to them, and writes
the rows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import NamedTuple

from amanda_tools.fingerprint.files import INPUT, OUTPUT, UNREADABLE, UNWRITTEN, digest_of

__all__ = ["MODULE", "STEP", "Group", "StepDigest", "Visit"]

#: Types of the rows' operators, which are not those of a framework.
MODULE, STEP = "module", "step"
#: Flags of values that are not in the digest, by the position of the row that says so.
LEFT_OUT = {1: UNREADABLE, 2: UNWRITTEN}
_ANY_LEFT_OUT = UNREADABLE | UNWRITTEN
_VALUE = struct.Struct("<QQQHH")
_DIGESTS = struct.Struct("<QQQ")


class Group(NamedTuple):
    """The phase, module and zone of a visit."""

    phase: str
    module: str
    zone: str

    @property
    def name(self) -> str:
        """Return the module as readers know it, with its zone outside of the model."""
        name = self.module or "outside of modules"
        return name if self.zone == "model" else f"{name} ({self.zone})"

    @property
    def digest(self) -> int:
        """Return a digest of it."""
        return digest_of(repr(self).encode())


class Visit:
    """Digests of what one visit of a module read from elsewhere and of what it wrote.

    The digests depend on the order of executions, but not on the arguments below.

    Args:
        group: The module.
        op: Number that its rows have in the place of an operator's: that of the module in the
            file's list of operators. If only digests of steps are written, any of its own.
        order: Number of the visit in the order of execution, which its rows have.
        execution: Number of earlier visits of the module.
        thread: Number of the thread.
    """

    def __init__(self, group: Group, op: int, order: int, execution: int, thread: int) -> None:
        import xxhash

        self.group, self.op, self.order = group, op, order
        self.execution, self.thread = execution, thread
        self._digests = {INPUT: xxhash.xxh3_64(), OUTPUT: xxhash.xxh3_64()}
        #: Orders of the rows of executions in it.
        self.orders: set[int] = set()
        #: What was read or written and is not in the digest.
        self._left_out: set[tuple[int, int]] = set()

    def add_execution(self, op: int, order: int) -> None:
        """Add that an operator ran.

        Args:
            op: Digest of the operator's name.
            order: Number of the execution in the order of execution. It is not in the digest.
        """
        self.orders.add(order)
        self._digests[OUTPUT].update(struct.pack("<Q", op))

    def add(
        self, what: int, op: int, kind: int, position: int, item: int, digest: int, flags: int
    ) -> None:
        """Add a value.

        Args:
            what: `INPUT` or `OUTPUT`.
            op: Digest of the operator's name.
            kind: Digest of the value's type.
            position: Its position among the operator's inputs or outputs.
            item: Its place in the list that is at this position.
            digest: Its digest.
            flags: Flags of its row, which say why a value has no digest.
        """
        if flags & _ANY_LEFT_OUT:
            place = max(place for place, flag in LEFT_OUT.items() if flags & flag)
            self._left_out.add((what, place))
        else:
            self._digests[what].update(_VALUE.pack(op, kind, digest, position, item))

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield its rows: `INPUT` or `OUTPUT`, the position, the flags and the digest.

        The row at position 0 has the digest. The flags of others say which values are not in it.
        """
        for what, digest in self._digests.items():
            yield what, 0, 0, digest.intdigest()
        for what, position in sorted(self._left_out):
            yield what, position, LEFT_OUT[position], 0


class StepDigest:
    """The digest of all visits of one step.

    It is the sum of the visits' digests modulo 2**64. So it does not depend on the order in which
    they are added, since threads may run visits in any order.

    Attributes:
        order: Number of the step's first visit in the order of execution, which its rows have;
            None if there is none. It is not in the digest.
    """

    def __init__(self) -> None:
        self.order: int | None = None
        self._sum = 0
        self._left_out = 0

    def add(self, visit: Visit) -> None:
        """Add a visit."""
        own = [digest for _, position, _, digest in visit.rows() if position == 0]
        left_out = reduce(or_, (flags for _, _, flags, _ in visit.rows()))
        self.join(visit.order, digest_of(_DIGESTS.pack(visit.group.digest, *own)), left_out)

    def join(self, order: int, digest: int, left_out: int) -> None:
        """Add the sum of the digests of visits.

        Args:
            order: Number of the first visit in the order of execution.
            digest: The sum.
            left_out: Flags of values that are not in it.
        """
        self.order = order if self.order is None else min(self.order, order)
        self._sum = (self._sum + digest) % (1 << 64)
        self._left_out |= left_out

    def rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield its rows, as `Visit.rows` does, all of them with `OUTPUT`."""
        yield OUTPUT, 0, 0, self._sum
        for position, flag in LEFT_OUT.items():
            if self._left_out & flag:
                yield OUTPUT, position, flag, 0
