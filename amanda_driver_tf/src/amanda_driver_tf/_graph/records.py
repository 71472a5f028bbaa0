"""The recorder: which ops of a graph are the gradient of which op, noted while graphs are built.

Owns the wrappers around TensorFlow's two ways to differentiate a graph (`tf.gradients`, and tapes
inside functions), the records that they leave on the graph of the gradient, and the graphs behind
function names. TensorFlow keeps neither. The wrappers stay once installed: what is traced between
two extents of `apply` must be known in the second. They change nothing of what is built.
"""

from __future__ import annotations

import bisect
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tensorflow.python.eager import backprop, context, execute, imperative_grad, record
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import func_graph as func_graph_module
from tensorflow.python.framework import indexed_slices, ops
from tensorflow.python.framework import tensor as tensor_lib
from tensorflow.python.ops import gradients_util

from amanda_driver_tf import _pywrap

__all__ = [
    "GRAPHS",
    "Record",
    "Records",
    "Run",
    "children_of",
    "components",
    "differentiate_anew",
    "graph_of",
    "install",
    "is_installed",
    "name_of",
]

#: Name of a function -> the graph that it was made from, while that lives.
GRAPHS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

_ATTRIBUTE = "_amanda_records"
_CHILDREN = "_amanda_gradients"
_NAME = "_amanda_name"
_HEARD = "_amanda_heard"
_READ = "_amanda_names_read"

# What tf.gradients calls the ops of a gradient, and what tapes do; the latter name no op.
_OF_GRADIENTS = re.compile(r"^(?:.*?/)?gradients(?:_\d+)?/(.+)_grad(?:_\d+)?/")
_OF_TAPES = re.compile(r"(?:^|/)gradient_tape/")
_MARK = "_amanda_op"


class Run:
    """One differentiation: what was asked for, and what came out.

    Attributes:
        sources: Tensors (or resource handles) whose gradients were asked for.
        results: Their gradients, None where there is none.
    """

    __slots__ = ("results", "sources")

    def __init__(self, sources: Sequence[Any]) -> None:
        self.sources = tuple(sources)
        self.results: tuple[Any, ...] = ()


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

    @property
    def is_named(self) -> bool:
        """Whether only the pairing is known, from names."""
        return self.stop == 0


class Records:
    """What was noted of one graph: gradient ops in it, in order of their creation.

    Attributes:
        records: The gradients.
        runs: The differentiations.
        captured: Placeholder (its op's id and its index) -> the tensor that it stands for.
    """

    def __init__(self, graph: Any) -> None:
        self._reference = weakref.ref(graph)
        self._read_until = -1
        self._names: frozenset[str] = frozenset()
        self._unpaired = False
        self.captured: dict[tuple[int, int], Any] = {}
        self.records: list[Record] = []
        self.runs: list[Run] = []
        self._starts: list[int] = []
        self._around: list[int] = []
        self._named: dict[str, Record] = {}
        self._by_forward_until = 0
        self._by_forward: dict[int, list[Record]] = {}
        self._contributed = 0
        self._contributions: dict[tuple[int, int], list[tuple[Record, int]]] = {}
        self._sorted: list[Record] = []

    @classmethod
    def of(cls, graph: Any) -> Records | None:
        """The records of a graph, or None where no gradient was built in it."""
        found: Records | None = getattr(graph, _ATTRIBUTE, None)
        if found is None and not hasattr(graph, _READ):
            setattr(graph, _READ, True)
            names = [op.name for op in graph.get_operations()]
            if any(_OF_GRADIENTS.search(name) or _OF_TAPES.search(name) for name in names):
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

    def contributions(self) -> dict[tuple[int, int], list[tuple[Record, int]]]:
        """Tensor (its op's id and its index) -> the gradients that it is, with their positions."""
        if self._contributed != len(self.records):
            self._contributed = len(self.records)
            self._contributions = {}
            for found in self.records:
                for position, gradient in enumerate(found.in_grads):
                    for tensor in components(gradient):
                        key = (id(tensor.op), tensor.value_index)
                        self._contributions.setdefault(key, []).append((found, position))
        return self._contributions

    def of_op(self, op: Any) -> list[Record]:
        """The gradients of an op."""
        return [found for found in self.records if found.forward is op]

    def is_gradient(self, tensor: Any) -> bool:
        """Whether a tensor is what some gradient function returned."""
        return (id(tensor.op), tensor.value_index) in self.contributions()

    def owner(self, op: Any) -> Record | None:
        """The innermost gradient whose function made `op`."""
        if len(self._sorted) != len(self.records):
            self._sorted = sorted(self.records, key=lambda r: (r.start, -r.stop))
            self._starts = [found.start for found in self._sorted]
            self._around = _enclosing(self._sorted)
        number = op._id
        index = bisect.bisect_right(self._starts, number) - 1
        # Extents nest; an inner one that ended before does not hold the op, one around it may.
        while index >= 0:
            found = self._sorted[index]
            if number < found.stop:
                return found
            index = self._around[index]
        return self._named_owner(op)

    def is_recomputed(self, op: Any, owner: Record) -> bool:
        """Whether a gradient runs a forward op again, and differentiates it itself."""
        if self._by_forward_until != len(self.records):
            self._by_forward_until = len(self.records)
            self._by_forward = {}
            for found in self.records:
                self._by_forward.setdefault(id(found.forward), []).append(found)
        return any(
            owner.start <= found.start and found.stop <= owner.stop
            for found in self._by_forward.get(id(op), ())
        )

    def recomputes(self) -> bool:
        """Whether some gradient runs forward ops again."""
        graph = self._reference()
        for found in self.records:
            if found.forward.graph is graph:
                owner = self.owner(found.forward)
                if owner is not None and self.is_recomputed(found.forward, owner):
                    return True
        return False

    def read_from_names(self) -> frozenset[str]:
        """Names of the ops of which only the pairing with their gradients' ops is known."""
        self._read()
        return self._names

    def has_unpaired(self) -> bool:
        """Whether there are gradients' ops of which not even that is known."""
        self._read()
        return self._unpaired

    def _read(self) -> None:
        graph = self._reference()
        count = ops.Graph.num_operations(graph)
        if self._read_until == count:
            return
        self._read_until = count
        named: set[str] = set()
        self._unpaired = False
        for op in graph.get_operations():
            owner = self.owner(op)
            if owner is None:
                self._unpaired = self._unpaired or bool(_OF_TAPES.search(op.name))
            elif owner.is_named:
                named.add(owner.forward.name)
        self._names = frozenset(named)

    def _named_owner(self, op: Any) -> Record | None:
        """By name, for what was built before the recorder listened, or read from a file."""
        match = _OF_GRADIENTS.search(op.name)
        if match is None:
            return None
        name = match.group(1)
        if name not in self._named:
            try:
                forward = op.graph.get_operation_by_name(name)
            except KeyError:
                return None
            none: tuple[Any, ...] = ()
            self._named[name] = Record(
                forward, forward.inputs, forward.outputs, none, frozenset(), none, (0, 0), None
            )
        return self._named[name]

    def contributions(self) -> dict[tuple[int, int], list[tuple[Record, int]]]:
        """Tensor (its op's id and its index) -> the gradients that it is, with their positions."""
        if self._contributed != len(self.records):
            self._contributed = len(self.records)
            self._contributions = {}
            for found in self.records:
                for position, gradient in enumerate(found.in_grads):
                    for tensor in components(gradient):
                        key = (id(tensor.op), tensor.value_index)
                        self._contributions.setdefault(key, []).append((found, position))
        return self._contributions

    def of_op(self, op: Any) -> list[Record]:
        """The gradients of an op."""
        return [found for found in self.records if found.forward is op]

    def is_gradient(self, tensor: Any) -> bool:
        """Whether a tensor is what some gradient function returned."""
        return (id(tensor.op), tensor.value_index) in self.contributions()

    def owner(self, op: Any) -> Record | None:
        """The innermost record whose gradient function made `op`."""
        if len(self._sorted) != len(self.records):
            self._sorted = sorted(self.records, key=lambda r: (r.start, -r.stop))
            self._starts = [found.start for found in self._sorted]
            self._around = _enclosing(self._sorted)
        number = op._id
        index = bisect.bisect_right(self._starts, number) - 1
        # Extents nest; an inner one that ended before does not hold the op, one around it may.
        while index >= 0:
            found = self._sorted[index]
            if number < found.stop:
                return found
            index = self._around[index]
        return None


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
        return [gradient.values, gradient.indices]
    return [gradient] if _is_symbolic(gradient) else []


class _Thread(threading.local):
    def __init__(self) -> None:
        self.runs: list[Run] = []
        #: The gradients collected last by `_AggregatedGrads`: op, list, copy of it.
        self.collected: tuple[Any, list[Any], list[Any]] | None = None


_THREAD = _Thread()
_INSTALLED: list[bool] = []


def _children(graph: Any) -> weakref.WeakSet[Any]:
    found: weakref.WeakSet[Any] | None = getattr(graph, _CHILDREN, None)
    if found is None:
        found = weakref.WeakSet()
        setattr(graph, _CHILDREN, found)
    return found


def children_of(graph: Any) -> list[Any]:
    """Graphs of gradients that were built for a function graph and are still there."""
    return list(getattr(graph, _CHILDREN, ()))


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
        function = outer._functions.get(name) if hasattr(outer, "_functions") else None
        graph = getattr(function, "_cached_graph", None)
        if graph is not None:
            GRAPHS[name] = graph
        outer = getattr(outer, "outer_graph", None)
    return graph


def differentiate_anew(function: Any) -> None:
    """Have a ConcreteFunction's gradients built again, if they were built without the recorder."""
    graph = function._func_graph
    if getattr(graph, _HEARD, False):
        return
    setattr(graph, _HEARD, True)
    if any(Records.of(child) is not None for child in children_of(graph)):
        return
    function._first_order_tape_functions.clear()
    function._higher_order_tape_functions.clear()
    function._delayed_rewrite_functions._cached_function_pairs.clear()


def is_installed() -> bool:
    """Whether the recorder listens."""
    return bool(_INSTALLED)


def install() -> None:
    """Start listening, for the rest of the process; a second call does nothing."""
    if _INSTALLED:
        return
    _INSTALLED.append(True)
    gradients_util._GradientsHelper = _run_of_gradients(gradients_util._GradientsHelper)
    gradients_util._AggregatedGrads = _collecting(gradients_util._AggregatedGrads)
    gradients_util._MaybeCompile = _recording(gradients_util._MaybeCompile)
    gradients_util._LogOpGradients = _completing(gradients_util._LogOpGradients)
    imperative_grad.imperative_grad = _run_of_tape(imperative_grad.imperative_grad)
    execute.record_gradient = _marking(execute.record_gradient)
    backprop._gradient_function = _of_tape(backprop._gradient_function)
    _pywrap.register_gradient_function(backprop._gradient_function)
    record.record_operation = _wrapping(record.record_operation)
    atomic_function.from_func_graph = _naming(atomic_function.from_func_graph)


# Every graph has a source and a sink, numbered 0 and 1.
_FIRST = 2


def _next_id(graph: Any) -> int:
    # Through the class: a graph that hides something would leave it out of the count.
    return int(ops.Graph.num_operations(graph)) + _FIRST


def _flat(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else [values]


def _note(
    forward: Any,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    out_grads: Sequence[Any],
    missing: frozenset[int],
    compute: Callable[[], Any],
) -> Any:
    graph = ops.get_default_graph()
    start = _next_id(graph)
    result = compute()
    run = _THREAD.runs[-1] if _THREAD.runs else None
    extent = (start, _next_id(graph))
    Records.made(graph).add(
        Record(forward, inputs, outputs, out_grads, missing, _flat(result), extent, run)
    )
    return result


# tf.gradients, also used for the backward functions of tf.functions.


def _run_of_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    def _GradientsHelper(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        sources = [getattr(x, "handle", x) for x in _flat(xs)]
        return _in_run(sources, lambda: original(ys, xs, *args, **kwargs))

    return _GradientsHelper


def _in_run(sources: Sequence[Any], compute: Callable[[], Any]) -> Any:
    run = Run(sources)
    _THREAD.runs.append(run)
    try:
        results = compute()
    finally:
        _THREAD.runs.pop()
    run.results = tuple(_flat(results))
    graph = ops.get_default_graph()
    found = Records.made(graph)
    found.runs.append(run)
    for outer, inner in getattr(graph, "captures", ()):
        # Noted now: branches forget what they captured once they are built.
        found.captured.setdefault((id(inner.op), inner.value_index), outer)
    return results


def _collecting(original: Callable[..., Any]) -> Callable[..., Any]:
    def _AggregatedGrads(grads: Any, op: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N802
        collected = original(grads, op, *args, **kwargs)
        # The caller fills this very list with zeros.
        _THREAD.collected = (op, collected, list(collected))
        return collected

    return _AggregatedGrads


def _recording(original: Callable[..., Any]) -> Callable[..., Any]:
    def _MaybeCompile(scope: Any, op: Any, func: Any, grad_fn: Any) -> Any:  # noqa: N802
        collected = _THREAD.collected
        if collected is None or collected[0] is not op:
            return original(scope, op, func, grad_fn)
        _, filled, found = collected
        _THREAD.collected = None
        missing = frozenset(i for i, gradient in enumerate(found) if _is_missing(gradient))
        return _note(
            op,
            op.inputs,
            op.outputs,
            filled,
            missing,
            lambda: original(scope, op, func, grad_fn),
        )

    return _MaybeCompile


def _completing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of gated gradients: what is passed on is another tensor than the gradient function made."""

    def _LogOpGradients(op: Any, out_grads: Any, in_grads: Any) -> Any:  # noqa: N802
        found = Records.made(ops.get_default_graph()).records
        if found and found[-1].forward is op:
            found[-1].in_grads = tuple(in_grads)
            found[-1].stop = _next_id(ops.get_default_graph())
        return original(op, out_grads, in_grads)

    return _LogOpGradients


def _is_missing(gradient: Any) -> bool:
    return gradient is None or (isinstance(gradient, list) and not gradient)


# Tapes inside functions.


def _run_of_tape(original: Callable[..., Any]) -> Callable[..., Any]:
    def imperative_grad(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        if context.executing_eagerly():
            return original(tape, target, sources, *args, **kwargs)
        return _in_run(sources, lambda: original(tape, target, sources, *args, **kwargs))

    return imperative_grad


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    def record_gradient(op_name: Any, inputs: Any, attrs: Any, outputs: Any) -> Any:
        if outputs and isinstance(outputs[0], tensor_lib.Tensor) and hasattr(outputs[0], "graph"):
            first = outputs[0]
            if not isinstance(first, ops.EagerTensor):
                # The gradient function may be given neither inputs nor outputs of the op.
                attrs = (*attrs, _MARK, first.op)
        return original(op_name, inputs, attrs, outputs)

    return record_gradient


def _of_tape(original: Callable[..., Any]) -> Callable[..., Any]:
    def _gradient_function(
        op_name: Any,
        attrs: Any,
        num_inputs: Any,
        inputs: Any,
        outputs: Any,
        out_grads: Any,
        skip_input_indices: Any,
        forward_pass_name_scope: Any,
    ) -> Any:
        if not attrs or len(attrs) < 2 or attrs[-2] != _MARK:
            return original(
                op_name,
                attrs,
                num_inputs,
                inputs,
                outputs,
                out_grads,
                skip_input_indices,
                forward_pass_name_scope,
            )
        op = attrs[-1]
        missing = frozenset(i for i, gradient in enumerate(out_grads) if gradient is None)
        return _note(
            op,
            op.inputs,
            op.outputs,
            out_grads,
            missing,
            lambda: original(
                op_name,
                attrs[:-2],
                num_inputs,
                inputs,
                outputs,
                out_grads,
                skip_input_indices,
                forward_pass_name_scope,
            ),
        )

    return _gradient_function


def _wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of what is put on the tape with a gradient of its own: calls, custom gradients, reads."""

    def record_operation(
        op_type: Any,
        output_tensors: Any,
        input_tensors: Any,
        backward_function: Any,
        forward_function: Any = None,
    ) -> Any:
        first = output_tensors[0] if output_tensors else None
        if first is not None and _is_symbolic(first):
            forward, inputs, outputs = first.op, tuple(input_tensors), tuple(output_tensors)
            compute = backward_function

            def backward_function(*out_grads: Any) -> Any:
                if context.executing_eagerly():
                    return compute(*out_grads)
                missing = frozenset(i for i, g in enumerate(out_grads) if g is None)
                return _note(
                    forward, inputs, outputs, out_grads, missing, lambda: compute(*out_grads)
                )

        return original(op_type, output_tensors, input_tensors, backward_function, forward_function)

    return record_operation


def _is_symbolic(tensor: Any) -> bool:
    return isinstance(tensor, tensor_lib.Tensor) and not isinstance(tensor, ops.EagerTensor)


def _naming(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_func_graph(name: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        function = original(name, graph, *args, **kwargs)
        GRAPHS[function.name.decode()] = graph
        setattr(graph, _NAME, function.name.decode())
        if Records.of(graph) is not None:
            # Gradients capture what they need of the forward run.
            for outer, _ in graph.captures:
                source = getattr(outer, "graph", None)
                if isinstance(source, func_graph_module.FuncGraph):
                    _children(source).add(graph)
        return function

    return from_func_graph
