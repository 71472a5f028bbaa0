"""Records: which ops of a graph are the gradient of which op.

Owns the records that `recorder` makes while graphs are built, and pairing by op names where it made
none. TensorFlow keeps neither.
"""

from __future__ import annotations

import bisect
import itertools
import os
import re
import weakref
from collections.abc import Sequence
from typing import Any

from amanda_driver_tf.tensorflow_internals.modules import (
    backprop,
    indexed_slices,
    ops,
    tensor as tensor_lib,
)
from amanda_driver_tf.tensorflow_internals.names import JACOBIANS
from amanda_driver_tf.tensorflow_internals.objects import operation_number

__all__ = [
    "Record",
    "Records",
    "Run",
    "components",
    "differentiated_inside",
    "is_of_jacobian",
    "is_symbolic",
    "next_id",
]


_ATTRIBUTE = "_amanda_records"
_READ = "_amanda_names_read"
_INSIDE = "_amanda_inside"

# Names that tf.gradients and tapes give to the ops of a gradient. Tapes do not name the op.
_OF_GRADIENTS = re.compile(r"_grad(?:_\d+)?(?=/)")
_OF_TAPES = re.compile(r"(?:^|/)gradient_tape/")

_TAPES = backprop.__file__
_RECORDER = os.path.join(os.path.dirname(__file__), "recorder.py")

# Names that forward accumulators give to functions that compute tangents.
_OF_ACCUMULATORS = re.compile(r"_jvp_(?:exact|relaxed)_shapes_")

_RUNS = itertools.count(1)


class Run:
    """One differentiation: its targets, sources and results.

    Attributes:
        targets: The tensors that are differentiated.
        sources: The tensors (or resource handles) whose gradients are requested.
        results: Their gradients, with None for missing ones.
        number: Identifies the differentiation.
        around: Numbers of the differentiations whose gradient functions started this one. Their
            graphs are not referenced, so that they are not kept alive.
        start: Id of the first op that it made in its graph.
        stop: Id after the last one.
    """

    __slots__ = ("around", "number", "results", "sources", "start", "stop", "targets")

    def __init__(
        self, targets: Sequence[Any], sources: Sequence[Any], around: Run | None = None
    ) -> None:
        self.targets, self.sources = tuple(targets), tuple(sources)
        self.number = next(_RUNS)
        self.around: frozenset[int] = frozenset()
        if around is not None:
            self.around = around.around | {around.number}
        self.results: tuple[Any, ...] = ()
        self.start = self.stop = 0

    def is_asked_by(self, owner: Record) -> bool:
        """Return True if the gradient function of `owner` started this differentiation."""
        return (
            owner.run is not None
            and owner.run.number in self.around
            and owner.start <= self.start
            and self.stop <= owner.stop
        )

    def is_after(self, made: Record) -> bool:
        """Return True if a gradient existed when this differentiation began."""
        return made.run is not None and made.run.number < self.number and made.stop <= self.start


class Record:
    """The gradient of one op: a call of its gradient function while a graph was built.

    Without gradients and op ids, the pairing was read from names.

    Attributes:
        forward: The op that was differentiated.
        inputs: Its inputs, to which `in_grads` belong.
        outputs: Its outputs, to which `out_grads` belong.
        out_grads: The gradients passed to the gradient function. For an output that nothing depends
            on, this is a tensor of zeros or None.
        missing: Indices of the outputs that nothing depends on.
        in_grads: The gradients it returned.
        start: Id of the first op that it made in its graph.
        stop: Id after the last one.
        run: The differentiation that it belongs to; None if only names are known.
    """

    __slots__ = (
        "forward",
        "in_grads",
        "inputs",
        "missing",
        "out_grads",
        "outputs",
        "run",
        "start",
        "stop",
    )

    def __init__(
        self,
        forward: Any,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        out_grads: Sequence[Any],
        missing: frozenset[int],
        in_grads: Sequence[Any],
        extent: tuple[int, int],
        run: Run | None,
    ) -> None:
        self.forward = forward
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.out_grads, self.in_grads = tuple(out_grads), tuple(in_grads)
        self.missing = missing
        self.start, self.stop = extent
        self.run = run

    def is_within(self, other: Record) -> bool:
        """Return True if this gradient was made inside the gradient function of `other`.

        It may be several such functions deep. False if the `run` of one of both is not known.
        """
        return (
            self.run is not None
            and other.run is not None
            and other.run.number in self.run.around
            and other.start <= self.start
            and self.stop <= other.stop
        )

    @property
    def is_named(self) -> bool:
        """True if only the pairing is known, from names."""
        return self.stop == 0


class Records:
    """The gradients recorded in one graph, in order of their creation.

    Attributes:
        records: The gradients.
        unpropagated: Gradients that reached ops without a gradient function.
        runs: The differentiations.
        captured: Placeholder (its op's id and its index) -> the tensor that it stands for.
    """

    def __init__(self, graph: Any) -> None:
        self._reference = weakref.ref(graph)
        self._read_until = -1
        self._unpaired = self._followed = False
        self.captured: dict[tuple[int, int], Any] = {}
        self.records: list[Record] = []
        self.unpropagated: list[Record] = []
        self.runs: list[Run] = []
        self._starts: list[int] = []
        self._around: list[int] = []
        self._named: dict[str, Record] = {}
        self._by_forward_until = 0
        self._by_forward: dict[int, list[Record]] = {}
        self._reruns_until = 0
        self._reruns: dict[int, set[int]] = {}
        self._contributed = 0
        self._contributions: dict[tuple[int, int], list[tuple[Record, int]]] = {}
        self._sorted: list[Record] = []

    @classmethod
    def of(cls, graph: Any) -> Records | None:
        """Return the records of a graph, or None if no gradient was built in it."""
        found: Records | None = getattr(graph, _ATTRIBUTE, None)
        if found is None and not hasattr(graph, _READ):
            setattr(graph, _READ, True)
            if any(
                _OF_GRADIENTS.search(op.name) or _is_of_tape(op) for op in graph.get_operations()
            ):
                found = cls.made(graph)
        return found

    @classmethod
    def made(cls, graph: Any) -> Records:
        """Return the records of a graph, creating them if there are none."""
        found: Records | None = getattr(graph, _ATTRIBUTE, None)
        if found is None:
            found = cls(graph)
            setattr(graph, _ATTRIBUTE, found)
        return found

    def add(self, made: Record) -> None:
        """Add a gradient."""
        self.records.append(made)
        source, inner = made.forward.graph, self._reference()
        while inner is not None and inner is not source:
            inner = getattr(inner, "outer_graph", None)
        if inner is source and source is not self._reference():
            # Numbers, so that the inner graph is not referenced: its function may outlive it.
            setattr(
                source, _INSIDE, {*getattr(source, _INSIDE, ()), operation_number(made.forward)}
            )

    def contributions(self) -> dict[tuple[int, int], list[tuple[Record, int]]]:
        """Map each tensor (its op's id and its index) to the gradients it stands for, with their
        positions.
        """
        if self._contributed != len(self.records):
            self._contributed = len(self.records)
            self._contributions = {}
            for found in self.records:
                for position, gradient in enumerate(found.in_grads):
                    # Only the values of slices: their indices belong to the forward program.
                    for tensor in components(gradient)[:1]:
                        key = (id(tensor.op), tensor.value_index)
                        self._contributions.setdefault(key, []).append((found, position))
        return self._contributions

    def of_op_with_unpropagated(self, op: Any) -> list[Record]:
        """Return the gradients of an op, including those that were not propagated any further."""
        return [*self.of_op(op), *(each for each in self.unpropagated if each.forward is op)]

    def of_op(self, op: Any) -> list[Record]:
        """Return the gradients of an op."""
        if self._by_forward_until != len(self.records):
            self._by_forward_until = len(self.records)
            self._by_forward = {}
            for found in self.records:
                self._by_forward.setdefault(id(found.forward), []).append(found)
        return self._by_forward.get(id(op), [])

    def is_gradient(self, tensor: Any) -> bool:
        """Return True if some gradient function returned a tensor."""
        return (id(tensor.op), tensor.value_index) in self.contributions()

    def owner(self, op: Any) -> Record | None:
        """Return the innermost gradient whose gradient function made `op`; None if none did."""
        if len(self._sorted) != len(self.records):
            self._sorted = sorted(self.records, key=lambda r: (r.start, -r.stop))
            self._starts = [found.start for found in self._sorted]
            self._around = _enclosing(self._sorted)
        number = operation_number(op)
        index = bisect.bisect_right(self._starts, number) - 1
        # Ranges of ids are nested: an outer one may contain the op if the innermost does not.
        while index >= 0:
            found = self._sorted[index]
            if number < found.stop:
                return found
            index = self._around[index]
        return self._named_owner(op)

    def is_recomputed(self, op: Any, owner: Record) -> bool:
        """Return True if a gradient function reruns this forward op to differentiate it."""
        return operation_number(op) in self._rerun_by(owner)

    def recomputes(self) -> bool:
        """Return True if some gradient function reruns forward ops."""
        return any(map(self._rerun_by, self.records))

    def _rerun_by(self, owner: Record) -> set[int]:
        """Return the ids of the ops that a gradient function reruns and then differentiates.

        Not all of them are differentiated one by one: ops inside a custom gradient are not.
        """
        if self._reruns_until != len(self.runs):
            self._reruns_until = len(self.runs)
            self._reruns.clear()
        known = self._reruns.get(id(owner))
        if known is not None:
            return known
        found: set[int] = set()
        for run in self.runs:
            if not run.is_asked_by(owner):
                continue
            sources = {(id(t.op), t.value_index) for t in run.sources if is_symbolic(t)}
            waiting = [tensor for tensor in run.targets if is_symbolic(tensor)]
            while waiting:
                tensor = waiting.pop()
                number = operation_number(tensor.op)
                if (
                    number not in found
                    and owner.start <= number < run.start
                    and (id(tensor.op), tensor.value_index) not in sources
                ):
                    found.add(number)
                    waiting += tensor.op.inputs
        self._reruns[id(owner)] = found
        return found

    def has_unpaired(self) -> bool:
        """Return True if there are gradient ops whose forward op is not known."""
        self._read_ops()
        return self._unpaired

    def is_followed(self) -> bool:
        """Return True if a forward accumulator computes tangents in the graph."""
        self._read_ops()
        return self._followed

    def _read_ops(self) -> None:
        graph: Any = self._reference()
        count = ops.Graph.num_operations(graph)
        if self._read_until != count:
            self._read_until = count
            all_ops = graph.get_operations()
            # All gradients of a function were recorded, or none. The ops that pfor makes when it
            # vectorizes them are never recorded.
            self._followed = any(map(_is_tangent, all_ops))
            self._unpaired = any("/pfor/" in op.name for op in all_ops) or (
                not self.records
                and any(
                    _is_of_tape(op) and self.owner(op) is None and not _is_recorded(op)
                    for op in all_ops
                )
            )

    def _named_owner(self, op: Any) -> Record | None:
        """Find the owner by name, for graphs built without the recorder or read from a file."""
        if _OF_GRADIENTS.search(op.name) and _is_recorded(op):
            return None
        for match in _OF_GRADIENTS.finditer(op.name):
            # The gradient of `a/x` is in `<scope>/gradients/a/x_grad/`, for any scope. After an
            # import into `<scope>` the op itself is in that scope, too.
            segments = op.name[: match.start()].split("/")
            for place in range(len(segments) - 1):
                rest = segments[place + 1 :]
                for name in ("/".join(segments[:place] + rest), "/".join(rest)):
                    found = self._named_record(op, name)
                    if found is not None:
                        return found
        return None

    def _named_record(self, op: Any, name: str) -> Record | None:
        if name not in self._named:
            try:
                forward = op.graph.get_operation_by_name(name)
            except (KeyError, ValueError):
                return None
            if operation_number(forward) >= operation_number(op):
                return None
            none: tuple[Any, ...] = ()
            self._named[name] = Record(
                forward, forward.inputs, forward.outputs, none, frozenset(), none, (0, 0), None
            )
        return self._named[name]


def _is_of_tape(op: Any) -> bool:
    """Return True if an op's name, or that of the function it calls, marks it as part of a
    gradient.
    """
    if op.type == "Placeholder":
        return False  # A branch's placeholder is named after the tensor it captured.
    if _OF_TAPES.search(op.name) or _is_tangent(op):
        return True
    if not op.type.endswith("PartitionedCall"):
        return False
    return "__backward_" in op.get_attr("f").name


def is_of_jacobian(op: Any) -> bool:
    """Return True if an op was made by a method of a tape that computes a Jacobian."""
    frames = op.traceback or ()
    return any(one.name in JACOBIANS and one.filename == _TAPES for one in frames)


def _is_recorded(op: Any) -> bool:
    """Return True if `op` was created after the recorder was installed, so its records are
    complete.

    Some ops have the name of a gradient without being one: the condition of a loop that runs
    backwards, and the tensor lists that a loop keeps for it.
    """
    return any(frame.filename == _RECORDER for frame in op.traceback or ())


def _is_tangent(op: Any) -> bool:
    """Return True if an op computes the tangent of another op for a forward accumulator."""
    if not op.type.endswith("PartitionedCall"):
        return False
    return _OF_ACCUMULATORS.search(op.get_attr("f").name) is not None


def _enclosing(records: Sequence[Record]) -> list[int]:
    """Return for each sorted record the index of the next one that encloses it, or -1."""
    around: list[int] = []
    open_: list[int] = []
    for index, found in enumerate(records):
        while open_ and records[open_[-1]].stop <= found.start:
            open_.pop()
        around.append(open_[-1] if open_ else -1)
        open_.append(index)
    return around


def components(gradient: Any) -> list[Any]:
    """Return the tensors of a gradient: none, one, or the components of slices."""
    if gradient is None:
        return []
    if isinstance(gradient, indexed_slices.IndexedSlices):
        parts = [gradient.values, gradient.indices, gradient.dense_shape]
        return [part for part in parts if part is not None]
    return [gradient] if is_symbolic(gradient) else []


def differentiated_inside(graph: Any) -> set[int]:
    """Return the ids of the ops whose gradients may be computed in a function that the graph calls.

    These gradients are built in a graph inside `graph`. A gradient function that runs beside it may
    also have been built there.
    """
    found: set[int] = getattr(graph, _INSIDE, set())
    return found


# Every graph has a source and a sink, numbered 0 and 1.
_FIRST = 2


def next_id(graph: Any) -> int:
    """Return the id that the next op of a graph gets."""
    # Through the class: a graph that hides ops would not count them.
    return int(ops.Graph.num_operations(graph)) + _FIRST


def is_symbolic(tensor: Any) -> bool:
    """Return True if a value is a tensor of a graph."""
    return isinstance(tensor, tensor_lib.Tensor) and not isinstance(tensor, ops.EagerTensor)
