"""Comparison of two processes of one run: what should be equal in both.

A weight should be equal in both if a wrapper or its placement says so, or if it was when both read
it first. The values of operators should be equal if both processes read the same data.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from amanda_tools.fingerprint.files import (
    ARGUMENTS,
    CONSTANT,
    INPUT,
    KEPT,
    NOBODY,
    OUTPUT,
    UNSEEN_WRITER,
)
from amanda_tools.replicas.recorded import Process, is_partial, is_replica, shape_of, usable
from amanda_tools.replicas.result import Violation
from amanda_tools.replicas.tool import AT_STEP, AT_UPDATE, OWN, REDUCED

__all__ = ["Pair"]

#: Common types of operators that draw random numbers.
_RANDOM = ("random", "dropout")
#: Common types of operators that take a part of their input.
_CUTS = ("slice", "split", "gather")
#: Common types of operators that may write other values in each process.
_COMMUNICATING = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "recv"}
)


class Pair:
    """Two processes of one run.

    Args:
        one: The first process.
        other: The second one.

    Attributes:
        compared: Kind -> number of comparisons: of ``weights`` in a step, of their ``gradients``,
            and of other ``values``.
    """

    def __init__(self, one: Process, other: Process) -> None:
        import numpy

        self.one, self.other = one, other
        from amanda_tools.diff.pairing import paired  # Late: runs of one process compare nothing.

        self._mine, self._theirs = paired(one.run, other.run)
        self.a, self.b = one.rows[self._mine], other.rows[self._theirs]
        kinds, theirs = one.kinds[self._mine], other.kinds[self._theirs]
        self._usable = usable(self.a) & usable(self.b)
        self._equal = (self.a["digest"] == self.b["digest"]) & (kinds == theirs)
        #: Values of which both processes hold the same by their placements.
        self._replica = numpy.asarray([*map(is_replica, kinds)], bool) & (kinds == theirs)
        #: Values with other placements: parts of a value, or terms of a sum.
        self._apart = numpy.asarray(["Placement" in k for k in kinds], bool) & ~self._replica
        self._weight = one.is_weight[self._mine]
        self._varied = self.a["flags"] & CONSTANT == 0
        about = one.run.about
        self._replicated, self._sharded = about.get("replicated", []), about.get("sharded", [])
        self.compared = {"weights": 0, "gradients": 0, "values": 0}

    def violations(self) -> list[Violation]:
        """Return the violations of the first step that has any, in order of execution."""
        for step in sorted({*self.one.steps} & {*self.other.steps}):
            found = [*self._weights(step), *self._gradients(step), *self._values(step)]
            if found:
                return sorted(found, key=lambda one: one.order)
        return []

    @cached_property
    def replicas(self) -> set[str]:
        """Return the weights that should be equal in both."""
        found: set[str] = set()
        unsure: set[str] = set()
        different: set[str] = set()
        for name in self.one.reads.keys() & self.other.reads.keys():
            mine, theirs = (next(iter(p.reads[name].values())) for p in (self.one, self.other))
            kind = self.one.kinds[mine]
            if kind != self.other.kinds[theirs]:
                different.add(name)
                continue
            is_equal = self.one.rows["digest"][mine] == self.other.rows["digest"][theirs]
            root, _, short = name.partition(":")
            if "Placement" in kind:
                found |= {name} if is_replica(kind) else set()
            elif any(fnmatchcase(short, pattern) for pattern in self._sharded):
                continue
            elif (
                any(fnmatchcase(short, pattern) for pattern in self._replicated)
                or self.one.groups.get(root, 0) == self.one.processes > 1
            ):
                found.add(name)
            elif not is_equal:
                different.add(name)
            elif self.one.is_constant(mine):
                unsure.add(name)
            else:
                found.add(name)
        if found and not different:
            return found | unsure
        near = {_parent(name) for name in found} - {_parent(name) for name in different}
        found |= {name for name in unsure if _parent(name) in near}
        return found | (unsure & self._read_with_equal_values)

    @cached_property
    def _read_with_equal_values(self) -> set[str]:
        """Return the weights at whose first operator all values are equal in both processes."""
        found: set[str] = set()
        inputs = self._weight & (self.a["step"] == min(self.one.steps))
        for group in dict.fromkeys(self._groups[inputs].tolist()):
            own = self._groups == group
            values = own & self._usable & ~self._weight
            varied = values & self._varied
            reads, writes = (varied & (self.a["what"] == what) for what in (INPUT, OUTPUT))
            row = self.a[own][0]
            if self._equal[values].all() and reads.any() and writes.any():
                found |= {*self.one.run.weights[row["op"]].values()}
        return found

    @cached_property
    def _groups(self) -> Any:
        """Return for each row the number of its execution of an operator."""
        import numpy

        keys = self.a["op"].astype(numpy.uint64) << numpy.uint64(32) | self.a["execution"]
        return numpy.unique(keys, return_inverse=True)[1]

    def _weights(self, step: int) -> Iterator[Violation]:
        """Yield the replicated weights that both read first in a step, and that differ."""
        for name in sorted(self.replicas):
            mine, theirs = (p.reads[name].get(step) for p in (self.one, self.other))
            if mine is None or theirs is None:
                continue
            self.compared["weights"] += 1
            if self.one.rows["digest"][mine] != self.other.rows["digest"][theirs]:
                first = next(iter(self.one.reads[name]))
                why = "It differs when both processes read it first."
                if first != step:
                    why = f"It was equal in step {first}: what wrote it since is not the same."
                what = f"weight {_short(name)!r}"
                yield self.one.violation("weight", [self.other.name], mine, why, what)

    def _gradients(self, step: int) -> Iterator[Violation]:
        """Yield the replicated weights whose gradients differ when a wrapper has reduced them, or
        where an optimizer reads them.
        """
        equal: set[str] = set()
        for at in (REDUCED, AT_STEP, AT_UPDATE):
            mine, theirs = (p.gradients.get((step, at), {}) for p in (self.one, self.other))
            found = []
            for name in sorted(self.replicas & mine.keys() & theirs.keys()):
                a, b = mine[name], theirs[name]
                kinds = self.one.kinds[a], self.other.kinds[b]
                weight = self.one.kinds[next(iter(self.one.reads[name].values()))]
                whole = kinds[0] == kinds[1] and shape_of(kinds[0]) == shape_of(weight)
                whole = whole and not is_partial(kinds[0])
                self.compared["gradients"] += whole
                if whole and self.one.rows["digest"][a] != self.other.rows["digest"][b]:
                    is_own = all(_is_own(p, step, name) for p in (self.one, self.other))
                    why = "It differs after the reduction, where the optimizer reads it."
                    if at == REDUCED:
                        why = "It differs when the wrapper has reduced it."
                    if at == AT_UPDATE:
                        why = "It was equal before it was clipped: the norms differ."
                    elif name in equal:
                        why = "It was equal after the reduction: what wrote it since differs."
                    elif is_own:
                        why = (
                            "Each process has the gradient that it computed itself: it was not "
                            "reduced."
                        )
                    what = f"the gradient of weight {_short(name)!r}"
                    found.append(self.one.violation("gradient", [self.other.name], a, why, what))
                elif whole and at == REDUCED:
                    equal.add(name)
            yield from found
            if found:
                return

    def _values(self, step: int) -> Iterator[Violation]:
        """Yield values of operators that differ, as far as they should be equal."""
        now = (self.a["step"] == step) & self._usable & ~self._weight
        yield from self._placed(now)
        yield from self._buffers(now)
        known = {*self.one.groups.values()} == {self.one.processes}
        if known or not self._reads_same_data(now):
            return
        self.compared["values"] += int((now & self._equal).sum())
        yield from self._operators(step, now)

    def _placed(self, now: Any) -> Iterator[Violation]:
        """Yield the first value that is placed as a replica in both and differs."""
        import numpy

        compared = now & self._replica
        self.compared["values"] += int(compared.sum())
        for place in numpy.flatnonzero(compared & ~self._equal)[:1].tolist():
            why = "Its placement says that both processes have the same value."
            yield self._at(place, "value", why)

    def _buffers(self, now: Any) -> Iterator[Violation]:
        """Yield tensors that were there in earlier steps, and differ now."""
        import numpy

        kept = self.a["flags"] & self.b["flags"] & KEPT != 0
        differs = now & kept & ~self._equal & (self.a["what"] == INPUT) & ~self._backward
        first = self._first_read
        found = numpy.flatnonzero(differs & (self._equal & self._varied)[first])
        for place in found[:1].tolist():
            before = int(self.a["step"][first[place]])
            why = f"It was equal in step {before}: what wrote it since is not the same."
            yield self._at(place, "buffer", why)

    @cached_property
    def _first_read(self) -> Any:
        """Return for each row the first one of the same place of the same operator."""
        import numpy

        names = ["op", "what", "position", "item"]
        _, first, of = numpy.unique(self.a[names], return_index=True, return_inverse=True)
        return first[of]

    @cached_property
    def _backward(self) -> Any:
        import numpy

        of = [op.phase == "backward" or op.zone != "model" for op in self.one.run.ops]
        return numpy.asarray(of or [False])[self.a["op"]]

    def _reads_same_data(self, now: Any) -> bool:
        """Return True if both processes read the same data in a step, and drew the same."""
        import numpy

        # What an operator gives to other processes is not data that it reads.
        told = [op.word in _COMMUNICATING for op in self.one.run.ops]
        own = ~numpy.asarray(told or [False])[self.a["op"]]
        forward = now & self._varied & ~self._backward & own
        data = forward & (self.a["what"] == INPUT) & (self.a["producer"] == NOBODY)
        readers = numpy.unique(self._groups[now & (self.a["what"] == INPUT)])
        drawn = forward & (self.a["what"] == OUTPUT) & ~numpy.isin(self._groups, readers)
        found = data | drawn
        return bool(found.any() and self._equal[found].all())

    def _operators(self, step: int, now: Any) -> Iterator[Violation]:
        """Yield operators that read the same and write something else, and a loss that differs."""
        import numpy

        whole = (self.a["step"] == step) & ~self._backward
        is_input, is_output = self.a["what"] == INPUT, self.a["what"] == OUTPUT
        count = int(self._groups.max()) + 1 if len(self._groups) else 0

        def groups(rows: Any) -> Any:
            found = numpy.zeros(count, bool)
            found[self._groups[rows]] = True
            return found

        other_inputs = groups(whole & is_input & ~(self._equal & self._usable))
        read = groups(now & is_input & self._varied) & ~other_inputs
        told_apart = groups(whole & (self.a["what"] == ARGUMENTS) & ~self._equal)
        wrote = now & whole & is_output & ~self._equal & ~self._apart & read[self._groups]
        parts = self.a["order"][self._other_parts(step, now)]
        first = parts.min() if len(parts) else numpy.inf
        cut = False
        for place in numpy.flatnonzero(wrote).tolist():
            op = self.one.run.ops[self.a["op"][place]]
            cut = cut or self.a["order"][place] > first
            if told_apart[self._groups[place]] or op.word is None:
                cut = cut or op.word is None or op.word in _CUTS
                continue
            if cut or op.word in _COMMUNICATING:
                continue
            is_random = op.word in _RANDOM or "rand" in op.type
            why = "Both processes read the same there, and write something else."
            if is_random:
                why = "Both processes read the same there, and draw other random numbers."
            yield self._at(place, "random" if is_random else "output", why)
            return
        if not (cut or len(parts)):
            told = is_output & self._varied & ~self._backward & ~self._apart
            yield from self._loss(step, now & told)

    def _other_parts(self, step: int, now: Any) -> Any:
        """Return the inputs that differ, although all that their producers wrote is equal.

        The processes took different parts of it, as of the list that `chunk` returns.
        """
        import numpy

        known = self._equal & self._usable
        outputs = (self.a["step"] == step) & (self.a["what"] == OUTPUT)
        orders = self.a["order"]  # Of the execution, which the input names as its producer.
        wrote_equal = numpy.setdiff1d(orders[outputs], orders[outputs & ~known])
        unseen = (self.a["flags"] | self.b["flags"]) & UNSEEN_WRITER != 0
        read = now & ~self._equal & ~self._backward & ~unseen & (self.a["what"] == INPUT)
        return read & numpy.isin(self.a["producer"], wrote_equal)

    def _loss(self, step: int, outputs: Any) -> Iterator[Violation]:
        """Yield the loss if it differs, although both processes read the same data."""
        import numpy

        end = self.one.first_backward.get(step)
        if end is None:
            return
        before = {row for row in self.one.scalars(step) if self.one.rows["order"][row] < end}
        found = [place for place, row in enumerate(self._mine.tolist()) if row in before]
        found = [place for place in found if not self._backward[place]]
        if not found or self._equal[found[-1]] or self._is_of_a_part(found[-1]):
            return
        last = self.a["order"][found[-1]]
        orders = self.a["order"]
        equal = orders[outputs & self._equal & (orders < last)]
        since = equal.max() if len(equal) else -1
        places = numpy.flatnonzero(outputs & ~self._equal & (orders > since))
        op = self.one.run.ops[self.a["op"][places[0]]]
        why = (
            "Both processes read the same data. Up to there each layer ends with equal values; "
            f"none is equal since op {op.name!r}{f' at {op.source}' if op.source else ''}: a "
            "reduction is missing after it."
        )
        yield self._at(found[-1], "loss", why)

    def _is_of_a_part(self, place: int) -> bool:
        """Return True if a value is computed of the part of a distributed value that a process has.

        Terms of a sum are none: what is computed of one of them lacks a reduction.
        """
        import numpy

        partial = numpy.asarray([*map(is_partial, self.one.kinds[self._mine])], bool)
        differs = (self.a["what"] == INPUT) & ~self._equal & ~partial
        whole = (self.a["what"] == OUTPUT) & ~self._apart
        seen, orders = set[int](), [int(self.a["order"][place])]
        while orders:
            made = self.a["order"] == orders.pop()
            if not made.any():
                continue
            read = differs & (self._groups == self._groups[made][0])
            if (read & self._apart).any() and (made & whole).any():
                return True
            more = {*self.a["producer"][read].tolist()} - seen
            seen |= more
            orders += more
        return False

    def _at(self, place: int, kind: Any, why: str) -> Violation:
        return self.one.violation(kind, [self.other.name], int(self._mine[place]), why)


def _is_own(process: Process, step: int, name: str) -> bool:
    """Return True if a gradient is what the process computed itself."""
    own = process.sketches.get((step, OWN), {}).get(name, [])
    now = process.sketches.get((step, AT_STEP), {}).get(name, [])
    digests = [{*process.rows["digest"][rows].tolist()} for rows in (own, now)]
    return len(own) == 1 and digests[0] == digests[1]


def _short(name: str) -> str:
    return name.partition(":")[2] or name


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
