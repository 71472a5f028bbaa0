"""Where the values of one run leave those of another, whatever operators each is made of.

Two frameworks divide a network into other operators, so many values of one run have no counterpart
although both compute the same. What parts them is an operator from which on *no* value is found in
the other run: which operators read what one wrote is known from the values, if they were recorded.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from amanda_tools.diff.align import is_movement
from amanda_tools.diff.numbers import Tolerance, is_huge
from amanda_tools.dump.files import Dumped
from amanda_tools.dump.index import DumpedTensor
from amanda_tools.kit.tensors.values import HostTensor, numbers

__all__ = ["Dataflow", "Node", "Values"]

#: An execution of an operator: its number, the step, and the number of earlier executions.
Node = tuple[int, int, int]
#: Number of sorted values that are kept in memory.
_KEPT = 256


@dataclass(frozen=True)
class _Value:
    """One tensor that an execution read or wrote.

    Attributes:
        node: The execution.
        tensor: The tensor.
        digest: Digest of its elements, whatever its shape: a view has the same.
        norm: Its 2-norm; None if that tells nothing, as of integers and constants.
    """

    node: Node
    tensor: DumpedTensor
    digest: bytes
    norm: float | None


class Values:
    """The values of a run, to be found in any order of axes.

    Args:
        dumped: The run.
        tolerance: How far equal values of two runs may be apart.
    """

    def __init__(self, dumped: Dumped, tolerance: Tolerance) -> None:
        self.dumped, self.tolerance = dumped, tolerance
        self.all = list(_values(dumped))
        distinct = {value.digest: value for value in self.all if value.norm is not None}
        #: Number of elements and dtype -> 2-norms and values, in the order of norms.
        self._known: dict[tuple[int, str], list[tuple[float, bytes, _Value]]] = {}
        for digest, value in distinct.items():
            key = math.prod(value.tensor.shape), value.tensor.dtype
            self._known.setdefault(key, []).append((value.norm or 0.0, digest, value))
        for known in self._known.values():
            known.sort(key=lambda one: one[:2])
        self._sorted: dict[bytes, Any] = {}

    def ordered(self, value: _Value) -> Any:
        """Return the elements of a value from the smallest to the largest."""
        if value.digest not in self._sorted:
            if len(self._sorted) > _KEPT:
                self._sorted.clear()
            self._sorted[value.digest] = _ordered(self.dumped.read(value.tensor))
        return self._sorted[value.digest]

    def have(self, value: _Value, other: Values) -> bool:
        """Return True if this run has the elements of a value of another run, in any order."""
        return any(True for _ in self.like(value, other))

    def like(self, value: _Value, other: Values) -> Iterator[bytes]:
        """Yield the digest of each value with the elements of one of another run, in any order."""
        import numpy

        if value.norm is None:
            return
        relative, absolute = self.tolerance.of(value.tensor.dtype)
        count = math.prod(value.tensor.shape)
        root = math.sqrt(count)
        # Rounding of sums is relative to their terms, which a small element does not show.
        allowed = (absolute + relative) * max(1.0, value.norm / root)
        known = self._known.get((count, value.tensor.dtype), [])
        begin = bisect_left(known, value.norm - allowed * root, key=lambda one: one[0])
        for norm, digest, candidate in known[begin:]:
            if norm > value.norm + allowed * root:
                break
            apart = numpy.abs(other.ordered(value) - self.ordered(candidate))
            if (apart <= allowed + relative * numpy.abs(self.ordered(candidate))).all():
                yield digest

    def has_array(self, array: Any, dtype: str, other: Values) -> bool:
        """Return True if this run has the elements of an array, in any order."""
        array = array.astype(dtype if dtype in ("float64", "float16") else "float32")
        value = _value((0, 0, 0), _placeholder(array), HostTensor(array, array.dtype.name))
        other._sorted[value.digest] = _ordered(HostTensor(array, array.dtype.name))
        return self.have(value, other)

    def have_length(self, value: _Value) -> bool:
        """Return True if this run has a value of as many elements with the same 2-norm."""
        if value.norm is None or not value.norm:
            return False
        key = math.prod(value.tensor.shape), value.tensor.dtype
        known = self._known.get(key, [])
        begin = bisect_left(known, value.norm * (1 - 1e-6), key=lambda one: one[0])
        return begin < len(known) and known[begin][0] <= value.norm * (1 + 1e-6)


def _placeholder(array: Any) -> DumpedTensor:
    return DumpedTensor(0, 0, 0, "output", "0", "", array.dtype.name, list(array.shape))


def _value(node: Node, tensor: DumpedTensor, held: HostTensor) -> _Value:
    digest = hashlib.blake2b(held.array.tobytes(), digest_size=16).digest()
    norm = None
    if "float" in tensor.dtype:
        values = _ordered(held)
        if values[0] < values[-1]:
            norm = float((values**2).sum() ** 0.5)
    return _Value(node, tensor, digest, norm)


def _values(dumped: Dumped) -> Iterator[_Value]:
    for tensor in dumped.index.tensors:
        if tensor.file is None or tensor.what not in ("input", "weight", "output"):
            continue
        if math.prod(tensor.shape) < 2:
            continue  # Small numbers are equal by chance.
        node = (tensor.op, tensor.step, tensor.execution)
        yield _value(node, tensor, dumped.read(tensor))


def _ordered(held: HostTensor) -> Any:
    """Return elements from the smallest to the largest; those of masks and NaNs are 0."""
    import numpy

    values = numbers(held.array, held.dtype).astype(numpy.float64).ravel()
    is_ordinary = numpy.isfinite(values) & ~is_huge(values, held.dtype)
    return numpy.sort(numpy.where(is_ordinary, values, 0.0))


class Dataflow:
    """Which executions of a run read what others wrote, and which of them part the runs.

    An execution is *lost* if a way leads from it to a result that differs, by operators that read
    what those before them wrote, and nothing on this way is found in the other run. What is merely
    computed otherwise leads to values that are found again.

    Args:
        mine: The values of the run.
        theirs: Those of the other run.
        differing: Executions whose results differ from those of their counterparts, which are
            executions of the other run.

    Attributes:
        known: Whether inputs were recorded, so that there is something to say.
    """

    def __init__(self, mine: Values, theirs: Values, differing: Mapping[Node, Node]) -> None:
        self._ops = mine.dumped.index.ops
        #: Execution -> whether the other run has what it wrote.
        self._found: dict[Node, bool] = {}
        #: Execution -> those that wrote what it read.
        self._writers: dict[Node, set[Node]] = {}
        #: Executions that read a value that the other run has, too.
        self._reads_found: set[Node] = set()
        written: dict[bytes, Node] = {}
        #: Executions that wrote what they had read, such as dropout outside of training.
        passed: set[Node] = set()
        like = {
            value.digest: {*theirs.like(value, mine)}
            for value in {one.digest: one for one in mine.all}.values()
        }
        wrote = {value.node: value.digest for value in theirs.all if value.tensor.what == "output"}
        #: Execution whose result differs -> values of the other run that are not its result: what
        #: its counterpart wrote, and what it has itself read and hardly changed.
        others = {node: {wrote.get(other, b"")} for node, other in differing.items()}
        read = {(v.node, v.digest) for v in mine.all if v.tensor.what != "output"}
        for node, digest in read:
            if node in others:
                others[node] |= like[digest]
        for value in mine.all:
            is_output = value.tensor.what == "output" and (value.node, value.digest) not in read
            if is_output and value.node in others:
                like[value.digest] = like[value.digest] - others[value.node]
        for value in mine.all:
            found = self._found.setdefault(value.node, False)
            if value.tensor.what == "output":
                self._found[value.node] = found or bool(like[value.digest])
                if written.get(value.digest) in self._writers.get(value.node, ()):
                    passed.add(value.node)
                written[value.digest] = value.node
                continue
            if (writer := written.get(value.digest, value.node)) != value.node:
                self._writers.setdefault(value.node, set()).add(writer)
            if value.tensor.what == "input" and like[value.digest]:
                self._reads_found.add(value.node)
        self.known = bool(self._writers)
        readers: dict[Node, list[Node]] = {}
        for node, writers in self._writers.items():
            for writer in writers:
                readers.setdefault(writer, []).append(node)
        # What only moves a value that differs ends in what differs, too.
        ends = set(differing)
        for node in self._found:
            if is_movement(self._ops[node[0]]) or node in passed:
                ends |= {node} if self._writers.get(node, set()) & ends else set()
        self._lost: set[Node] = set()
        #: Executions after which the other run has values again.
        self._recovers: set[Node] = set()
        for node in reversed(self._found):
            follow = readers.get(node, [])
            parts = any(one in self._lost for one in follow) if follow else node in ends
            if self._found[node] or any(one in self._recovers for one in follow):
                self._recovers.add(node)
            if parts and not self._found[node]:
                self._lost.add(node)

    def is_found(self, node: Node) -> bool:
        """Return True if the other run has what this execution wrote."""
        return self._found.get(node, False)

    def recovers(self, node: Node) -> bool:
        """Return True if the other run has values that depend on what this execution wrote, and not
        only values that differ do.
        """
        return node in self._recovers and node not in self._lost

    def before(self, node: Node) -> list[int]:
        """Return the operators that part the runs before an execution reads what they wrote.

        Those come first that read a value which the other run has, then others, and those that only
        move values last, each in the order of execution.
        """
        found = sorted(self._before(node), key=self._rank)
        return list(dict.fromkeys(one[0] for one in found))

    def inputs_agree(self, node: Node) -> bool | None:
        """Return True if nothing parts the runs before an execution.

        None if only what is made of no value that the other run has does, such as a mask.
        """
        before = self._before(node)
        if any(self._rank(one) == 0 for one in before):
            return False
        return None if before else True

    def region(self, node: Node) -> set[Node]:
        """Return an execution, and those that part the runs before it."""
        return {node, *self._before(node)}

    def _before(self, node: Node) -> list[Node]:
        # What a later operator takes back, as softmax does a constant, loses nothing.
        missing = {one for one, is_found in self._found.items() if not is_found}
        parting = self._lost if node in self._lost else missing
        seen, waiting = {node}, [node]
        while waiting:
            new = (self._writers.get(waiting.pop(), set()) & parting) - seen
            seen |= new
            waiting += new
        return [one for one in self._found if one in seen and one[0] != node[0]]

    def _rank(self, node: Node) -> int:
        if is_movement(self._ops[node[0]]):
            return 2
        return 0 if node in self._reads_found else 1
