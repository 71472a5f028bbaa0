"""Where two dumps part that different operators made, and what kind of mistake that looks like."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from amanda_tools.diff.align import alike, is_common
from amanda_tools.diff.compared import Compared
from amanda_tools.diff.dataflow import Dataflow, Node, Values
from amanda_tools.diff.kinds import Evidence, kind_of
from amanda_tools.diff.numbers import Tolerance, is_huge
from amanda_tools.dump.files import Dumped
from amanda_tools.dump.index import WHAT, DumpedTensor
from amanda_tools.kit.operators.entries import OpFacts
from amanda_tools.kit.tensors.values import numbers

__all__ = ["Parting"]


class Parting:
    """Judges the differences of two dumps by the way that their values take.

    Args:
        dumps: Both dumps.
        tolerance: How far equal values may be apart.
        pairs: Number of an operator of the first -> that of its counterpart.
        compared: What was compared.

    Attributes:
        known: Whether inputs were recorded, so that there is something to say.
    """

    def __init__(
        self,
        dumps: tuple[Dumped, Dumped],
        tolerance: Tolerance,
        pairs: Mapping[int, int],
        compared: Sequence[Compared],
    ) -> None:
        self._dumps, self._pairs = dumps, dict(pairs)
        self._places: dict[int, int] = {}
        for number, op in enumerate(dumps[0].index.ops):
            self._places.setdefault(op.id, number)
        self._values = Values(dumps[0], tolerance), Values(dumps[1], tolerance)
        differing = [one for one in compared if one.what == "output" and not one.same]
        nodes = {self.node(one): self._there(one) for one in differing}
        self._flows = (
            Dataflow(*self._values, nodes),
            Dataflow(*self._values[::-1], {there: here for here, there in nodes.items()}),
        )
        self.known = self._flows[0].known and self._flows[1].known

    def node(self, one: Compared) -> Node:
        """Return the execution of a tensor in the first dump."""
        return self._places[one.a.id], one.step, one.execution

    def _there(self, one: Compared) -> Node:
        """Return the execution in the second dump, in which only the order of executions is the
        same.
        """
        number = self._pairs[self._places[one.a.id]]
        mine = self._executions(0, self._places[one.a.id])
        theirs = self._executions(1, number)
        return theirs[min(mine.index(self.node(one)), len(theirs) - 1)]

    def _executions(self, side: int, op: int) -> list[Node]:
        every = self._dumps[side].index.tensors
        return list(dict.fromkeys((t.op, t.step, t.execution) for t in every if t.op == op))

    def is_implausible(self, one: Compared) -> bool:
        """Return True if a difference only says that two operators do not belong together.

        What the first one wrote is elsewhere in the second run, or types alone do not tell that
        they belong together, and values agree again after it.
        """
        flow, node = self._flows[0], self.node(one)
        is_open = not alike(one.a, one.b) or is_common(one.a)
        return flow.is_found(node) or (is_open and flow.recovers(node))

    def inputs_agree(self, one: Compared) -> bool | None:
        """Return True if nothing parts the runs before an execution; None if a mask may.

        Where one operator does what several do, all of these are what is compared.
        """
        if not alike(one.a, one.b) and self._flows[1].inputs_agree(self._there(one)):
            return True
        return self._flows[0].inputs_agree(self.node(one))

    def closest(self, one: Compared) -> Node | None:
        """Return the execution of the second dump whose result is nearest to that of the first.

        It is one of those that part the runs, and another type computes it: where values disagree,
        types alone say which of several small operators ends what one operator does.
        """
        import numpy

        there = self._there(one)
        if alike(one.a, one.b):
            return None
        mine = [v for v in self._values[0].all if v.node == self.node(one)]
        result = next((v for v in mine if v.tensor.what == "output"), None)
        if result is None:
            return None
        ordered = self._values[0].ordered(result)
        region = self._flows[1].region(there)
        apart = {
            value.node: float(numpy.linalg.norm(self._values[1].ordered(value) - ordered))
            for value in self._values[1].all
            if value.node in region
            and value.tensor.what == "output"
            and math.prod(value.tensor.shape) == len(ordered)
        }
        best = min(apart, key=lambda node: apart[node], default=there)
        if best == there or apart[best] > 0.5 * apart.get(there, math.inf):
            return None
        self._pairs[self.node(one)[0]] = best[0]
        return best

    def explain(self, first: Compared) -> tuple[list[OpFacts], list[OpFacts], str | None]:
        """Return the operators of both runs that part them before the first difference, and the
        kind of mistake that the values show.
        """
        nodes = self.node(first), self._there(first)
        here = self._flows[0].before(nodes[0]) if first.inputs_agree is not None else []
        mine, theirs = self._facts(0, here), self._facts(1, self._flows[1].before(nodes[1]))
        kind = kind_of(self._evidence(first, nodes, mine))
        # Where the inputs agree, these are what the other run does in one operator.
        return mine if first.inputs_agree is False else [], theirs, kind

    def _facts(self, side: int, numbers_: Sequence[int]) -> list[OpFacts]:
        ops = (self._dumps[side].index.ops[number] for number in numbers_)
        return [OpFacts(**{f.name: getattr(op, f.name) for f in fields(OpFacts)}) for op in ops]

    def _evidence(
        self, first: Compared, nodes: tuple[Node, Node], suspects: Sequence[OpFacts]
    ) -> Evidence:
        regions = self._flows[0].region(nodes[0]), self._flows[1].region(nodes[1])
        root = nodes[0]
        if suspects:
            number = self._places[suspects[0].id]
            root = next(node for node in regions[0] if node[0] == number)
        parts = [self._parts(side, node) for side, node in enumerate(nodes)]
        # What parts them before is seen in what both read, if that can be compared.
        is_before = first.inputs_agree is False and alike(first.a, first.b)
        values = None
        for what in ("input", "output") if is_before else ("output",):
            if values is None and parts[0][what] and parts[1][what]:
                values = self._aligned(parts[0][what][0], parts[1][what][0], first)
        read = self._parts(0, root)["input"]
        # A bias may be added by an operator of its own, after that which has the kernel.
        there = [
            tensor
            for node in sorted(regions[1])
            for what in ("weight", "input")
            for tensor in self._parts(1, node)[what]
        ]
        weights = [
            (self._read(0, one), self._read(1, other))
            for one in parts[0]["weight"]
            for other in there
            if sorted(one.shape) == sorted(other.shape)
        ]
        ops = self._dumps[0].index.ops[root[0]], self._dumps[1].index.ops[nodes[1][0]]
        array = self._read(0, read[0]) if read else None
        return Evidence(
            ops[0].word,
            values,
            array,
            weights,
            (ops[0].weight_layout, ops[1].weight_layout),
            (self._dtypes(0, regions[0]), self._dtypes(1, regions[1])),
            lambda found: self._values[1].has_array(found, read[0].dtype, self._values[0]),
            lambda: (
                first.a.word in ("attention", "matmul", "einsum", "softmax")
                and any(
                    self._values[1].have_length(value)
                    for value in self._values[0].all
                    if value.node in regions[0] - {nodes[0]} and self._is_vector(value.tensor)
                )
            ),
        )

    def _is_vector(self, tensor: DumpedTensor) -> bool:
        """Return True for a result whose vectors have lengths of their own: a normalization would
        have given them one.
        """
        if tensor.what != "output" or len(tensor.shape) < 2 or tensor.shape[-1] < 2:
            return False
        squares = (self._read(0, tensor) ** 2).sum(-1)
        return bool(squares.std() > 0.01 * squares.mean())

    def _parts(self, side: int, node: Node) -> dict[str, list[DumpedTensor]]:
        found: dict[str, list[DumpedTensor]] = {what: [] for what in WHAT}
        for tensor in self._dumps[side].index.tensors:
            if (tensor.op, tensor.step, tensor.execution) == node and tensor.file is not None:
                found[tensor.what].append(tensor)
        return found

    def _dtypes(self, side: int, region: set[Node]) -> set[str]:
        return {value.tensor.dtype for value in self._values[side].all if value.node in region}

    def _read(self, side: int, tensor: DumpedTensor) -> Any:
        import numpy

        array = numbers(self._dumps[side].read(tensor).array, tensor.dtype).astype(numpy.float64)
        ordinary = numpy.isfinite(array) & ~is_huge(array, tensor.dtype)
        return numpy.where(ordinary, array, 0.0)

    def _aligned(
        self, one: DumpedTensor, other: DumpedTensor, first: Compared
    ) -> tuple[Any, Any] | None:
        mine, theirs = self._read(0, one), self._read(1, other)
        order = None if first.difference is None else first.difference.order
        if order is not None and len(order) == theirs.ndim:
            theirs = theirs.transpose(order)
        if mine.size != theirs.size:
            return None
        return mine, theirs.reshape(mine.shape)
