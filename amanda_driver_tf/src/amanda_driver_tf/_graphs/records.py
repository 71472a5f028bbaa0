"""Records: which ops of a graph are the gradient of which op.

Owns what `recorder` notes while graphs are built, where it noted nothing what ops' names tell, and
the graphs behind the names of functions. TensorFlow keeps none of these. Over 400 lines: one
subject.
"""

from __future__ import annotations

import bisect
import itertools
import os
import re
import weakref
from collections.abc import Sequence
from typing import Any

from amanda_driver_tf._tensorflow_internals.modules import func_graph as func_graph_module
from amanda_driver_tf._tensorflow_internals.modules import indexed_slices, ops
from amanda_driver_tf._tensorflow_internals.modules import tensor as tensor_lib
from amanda_driver_tf._tensorflow_internals.objects import (
    forget_gradients,
    functions_of,
    graph_of_concrete,
    graph_of_function,
    operation_number,
)

__all__ = [
    "GRAPHS",
    "Record",
    "Records",
    "Run",
    "children_of",
    "components",
    "differentiate_anew",
    "differentiated_inside",
    "graph_of",
    "is_symbolic",
    "name_graph",
    "name_of",
    "next_id",
]

#: Name of a function -> the graph that it was made from, while that lives.
GRAPHS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

_ATTRIBUTE = "_amanda_records"
_CHILDREN = "_amanda_gradients"
_NAME = "_amanda_name"
_HEARD = "_amanda_heard"
_READ = "_amanda_names_read"
_INSIDE = "_amanda_inside"

# What tf.gradients calls the ops of a gradient, and what tapes do; the latter name no op.
_OF_GRADIENTS = re.compile(r"_grad(?:_\d+)?(?=/)")
_OF_TAPES = re.compile(r"(?:^|/)gradient_tape/")

_RECORDER = os.path.join(os.path.dirname(__file__), "recorder.py")

# What forward accumulators call the functions of tangents.
_OF_ACCUMULATORS = re.compile(r"_jvp_(?:exact|relaxed)_shapes_")

_RUNS = itertools.count(1)


class Run:
    """One differentiation: what was asked for, and what came out.

    Attributes:
        targets: Tensors that were differentiated.
        sources: Tensors (or resource handles) whose gradients were asked for.
        results: Their gradients, None where there is none.
        number: Tells differentiations apart.
        around: Numbers of those whose gradient functions asked for this one; they may be of
            other graphs, which these must not keep alive.
        start: Its ops are those of its graph with ids from here on ...
        stop: ... to before here.
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
        """Return True if the gradient function of `owner` asked for this one."""
        return (
            owner.run is not None
            and owner.run.number in self.around
            and owner.start <= self.start
            and self.stop <= owner.stop
        )

    def is_after(self, made: Record) -> bool:
        """Return True if a gradient was there when this one began."""
        return made.run is not None and made.run.number < self.number and made.stop <= self.start


class Record:
    """The gradient of one op: a call of its gradient function while a graph was built.

    Attributes:
        forward: The op that was differentiated.
        inputs: Its inputs, which `in_grads` are for.
        outputs: Its outputs, which `out_grads` are for.
        out_grads: Gradients given to the gradient function; those of outputs that nothing depends
            on are zeros made for the purpose, or None.
        missing: Indices of the outputs that have no gradient of their own.
        in_grads: What it returned.
        start: The gradient's ops are those of its graph with ids from here on ...
        stop: ... to before here.
        run: The differentiation that it is part of.

    Without gradients and extent it was read from names.
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
        """Return True if the gradient function of `other` asked for this one."""
        return (
            self.run is not None
            and other.run is not None
            and other.run.number in self.run.around
            and other.start <= self.start
            and self.stop <= other.stop
        )

    @property
    def is_named(self) -> bool:
        """Whether only the pairing is known, from names."""
        return self.stop == 0


class Records:
    """What was noted of one graph: gradient ops in it, in order of their creation.

    Attributes:
        records: The gradients.
        unfollowed: Gradients that arrived at ops without a gradient function.
        runs: The differentiations.
        captured: Placeholder (its op's id and its index) -> the tensor that it stands for.
    """

    def __init__(self, graph: Any) -> None:
        self._reference = weakref.ref(graph)
        self._read_until = -1
        self._unpaired = False
        self.captured: dict[tuple[int, int], Any] = {}
        self.records: list[Record] = []
        self.unfollowed: list[Record] = []
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
        """The records of a graph, or None where no gradient was built in it."""
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
        """The records of a graph, made if there were none."""
        found: Records | None = getattr(graph, _ATTRIBUTE, None)
        if found is None:
            found = cls(graph)
            setattr(graph, _ATTRIBUTE, found)
        return found

    def add(self, made: Record) -> None:
        """Note one more gradient."""
        self.records.append(made)
        source, inner = made.forward.graph, self._reference()
        while inner is not None and inner is not source:
            inner = getattr(inner, "outer_graph", None)
        if inner is source and source is not self._reference():
            # Numbers, and not the graph: what was made of it may outlive it.
            setattr(
                source, _INSIDE, {*getattr(source, _INSIDE, ()), operation_number(made.forward)}
            )

    def contributions(self) -> dict[tuple[int, int], list[tuple[Record, int]]]:
        """Tensor (its op's id and its index) -> the gradients that it is, with their positions."""
        if self._contributed != len(self.records):
            self._contributed = len(self.records)
            self._contributions = {}
            for found in self.records:
                for position, gradient in enumerate(found.in_grads):
                    # Of slices their values: indices are the forward program's.
                    for tensor in components(gradient)[:1]:
                        key = (id(tensor.op), tensor.value_index)
                        self._contributions.setdefault(key, []).append((found, position))
        return self._contributions

    def of_op_unfollowed(self, op: Any) -> list[Record]:
        """The gradients of an op, with those that TensorFlow has followed no further."""
        return [*self.of_op(op), *(each for each in self.unfollowed if each.forward is op)]

    def of_op(self, op: Any) -> list[Record]:
        """The gradients of an op."""
        if self._by_forward_until != len(self.records):
            self._by_forward_until = len(self.records)
            self._by_forward = {}
            for found in self.records:
                self._by_forward.setdefault(id(found.forward), []).append(found)
        return self._by_forward.get(id(op), [])

    def is_gradient(self, tensor: Any) -> bool:
        """Return True if a tensor is what some gradient function returned."""
        return (id(tensor.op), tensor.value_index) in self.contributions()

    def owner(self, op: Any) -> Record | None:
        """The innermost gradient whose function made `op`."""
        if len(self._sorted) != len(self.records):
            self._sorted = sorted(self.records, key=lambda r: (r.start, -r.stop))
            self._starts = [found.start for found in self._sorted]
            self._around = _enclosing(self._sorted)
        number = operation_number(op)
        index = bisect.bisect_right(self._starts, number) - 1
        # Extents nest; an inner one that ended before does not hold the op, one around it may.
        while index >= 0:
            found = self._sorted[index]
            if number < found.stop:
                return found
            index = self._around[index]
        return self._named_owner(op)

    def is_recomputed(self, op: Any, owner: Record) -> bool:
        """Return True if a gradient runs a forward op again, for what it differentiates itself."""
        return operation_number(op) in self._rerun_by(owner)

    def recomputes(self) -> bool:
        """Return True if some gradient runs forward ops again."""
        return any(map(self._rerun_by, self.records))

    def _rerun_by(self, owner: Record) -> set[int]:
        """Ids of the ops that lead to what a gradient function differentiates itself.

        Not all of these are differentiated one by one: those of custom gradients are not.
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
        """Return True if there are ops of gradients whose forward op is not known."""
        graph: Any = self._reference()
        count = ops.Graph.num_operations(graph)
        if self._read_until != count:
            self._read_until = count
            all_ops = graph.get_operations()
            # The recorder heard all of a function's gradients or none; what pfor vectorises it
            # makes anew from them, unheard.
            self._unpaired = any("/pfor/" in op.name or _is_tangent(op) for op in all_ops) or (
                not self.records
                and any(
                    _is_of_tape(op) and self.owner(op) is None and not _is_heard(op)
                    for op in all_ops
                )
            )
        return self._unpaired

    def _named_owner(self, op: Any) -> Record | None:
        """By name, for what was built before the recorder listened, or read from a file."""
        if _OF_GRADIENTS.search(op.name) and _is_heard(op):
            return None
        for match in _OF_GRADIENTS.finditer(op.name):
            # The gradient of `a/x` is in `<scope>/gradients/a/x_grad/`, whatever the scope; after
            # an import into `<scope>` the op is there, too.
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
    """Return True if an op's name, or that of the function it calls, says that it is a gradient."""
    if op.type == "Placeholder":
        return False  # What a branch captures is called after it.
    if _OF_TAPES.search(op.name) or _is_tangent(op):
        return True
    if not op.type.endswith("PartitionedCall"):
        return False
    return "__backward_" in op.get_attr("f").name


def _is_heard(op: Any) -> bool:
    """Return True if `op` was created after the recorder was installed: its records are complete.

    The condition of a loop that runs backwards is named like a gradient, and so is what a loop
    keeps for it; they are none.
    """
    return any(frame.filename == _RECORDER for frame in op.traceback or ())


def _is_tangent(op: Any) -> bool:
    """Return True if an op computes what a forward accumulator follows another op by."""
    if not op.type.endswith("PartitionedCall"):
        return False
    return _OF_ACCUMULATORS.search(op.get_attr("f").name) is not None


def _enclosing(records: Sequence[Record]) -> list[int]:
    """For each of the sorted records the index of the next one around it, -1 where none is."""
    around: list[int] = []
    open_: list[int] = []
    for index, found in enumerate(records):
        while open_ and records[open_[-1]].stop <= found.start:
            open_.pop()
        around.append(open_[-1] if open_ else -1)
        open_.append(index)
    return around


def components(gradient: Any) -> list[Any]:
    """The tensors that a gradient consists of: none, one, or those of its slices."""
    if gradient is None:
        return []
    if isinstance(gradient, indexed_slices.IndexedSlices):
        parts = [gradient.values, gradient.indices, gradient.dense_shape]
        return [part for part in parts if part is not None]
    return [gradient] if is_symbolic(gradient) else []


def _children(graph: Any) -> weakref.WeakSet[Any]:
    found: weakref.WeakSet[Any] | None = getattr(graph, _CHILDREN, None)
    if found is None:
        found = weakref.WeakSet()
        setattr(graph, _CHILDREN, found)
    return found


def children_of(graph: Any) -> list[Any]:
    """Graphs of gradients that were built for a function graph and are still there."""
    return list(getattr(graph, _CHILDREN, ()))


def differentiated_inside(graph: Any) -> set[int]:
    """Ids of the ops of a graph whose gradients may be computed in a function that it runs.

    They are built in a graph inside it; so are gradients that the graph beside it runs.
    """
    found: set[int] = getattr(graph, _INSIDE, set())
    return found


def name_of(graph: Any) -> str:
    """The name of the function that was made from a graph last."""
    return str(getattr(graph, _NAME))


def graph_of(name: str, outer: Any = None) -> Any:
    """The graph that a function was made from, or None if that is not known.

    Args:
        name: The function.
        outer: The graph of a function that calls it, for one made before the recorder listened.
    """
    graph = GRAPHS.get(name)
    while graph is None and outer is not None:
        graph = graph_of_function(functions_of(outer).get(name))
        if graph is not None:
            GRAPHS[name] = graph
        outer = getattr(outer, "outer_graph", None)
    return graph


def differentiate_anew(function: Any) -> None:
    """Drop a ConcreteFunction's gradients if they were built without the recorder."""
    graph = graph_of_concrete(function)
    if getattr(graph, _HEARD, False):
        return
    setattr(graph, _HEARD, True)
    if any(Records.of(child) is not None for child in children_of(graph)):
        return
    forget_gradients(function)


def name_graph(name: str, graph: Any) -> None:
    """Note that a function of this name was made from a graph."""
    GRAPHS[name] = graph
    setattr(graph, _NAME, name)
    found = Records.of(graph)
    if found is not None:
        # Gradients capture what they need of the forward run, which may be nothing.
        sources = [getattr(outer, "graph", None) for outer, _ in graph.captures]
        for source in (*sources, *(made.forward.graph for made in found.records)):
            if isinstance(source, func_graph_module.FuncGraph) and source is not graph:
                _children(source).add(graph)


# Every graph has a source and a sink, numbered 0 and 1.
_FIRST = 2


def next_id(graph: Any) -> int:
    """The id that the next op of a graph gets."""
    # Through the class: a graph that hides something would leave it out of the count.
    return int(ops.Graph.num_operations(graph)) + _FIRST


def is_symbolic(tensor: Any) -> bool:
    """Return True if a value is a tensor of a graph."""
    return isinstance(tensor, tensor_lib.Tensor) and not isinstance(tensor, ops.EagerTensor)
