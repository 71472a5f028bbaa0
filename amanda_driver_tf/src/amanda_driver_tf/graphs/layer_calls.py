"""`LayerCall`: calls of Keras' layers while a graph is built, with the tensors that they take and
return.

Owns the wrapper around `Layer.__call__`, which stays installed like those of `recorder`: a function
that is traced outside of `apply` may run inside of it. It does not change what is built.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from amanda_core.driver_kit import MODULE_INPUT, MODULE_OUTPUT, ImportWatcher, arrays_in
from amanda_driver_tf.graphs.records import is_symbolic, next_id
from amanda_driver_tf.identity.frames import LAYERS
from amanda_driver_tf.tensorflow_internals.modules import context, dtypes, ops, tensor as tensor_lib
from amanda_driver_tf.tensorflow_internals.objects import operation_number

__all__ = ["ARRAYS", "RECORDED", "LayerCall", "ModuleValue", "calls_in", "record_layers"]

#: Classes of what may be the value of a layer.
ARRAYS = (tensor_lib.Tensor, np.ndarray)
_ATTRIBUTE = "_amanda_layers"
_NUMBERS = itertools.count(1)


class ModuleValue:
    """A value that a layer takes or returns in a graph, in the form of a `tf.Operation`.

    Attributes:
        type: `MODULE_INPUT` or `MODULE_OUTPUT`.
        name: Path of the layer and type; numbered if the graph calls the layer several times.
        graph: The graph.
        inputs: The tensor.
        outputs: The tensor.
        op_def: That of the op that makes the tensor.
        traceback: The stack at that op, if the layer called it; else empty.
    """

    __slots__ = (
        "__weakref__",
        "_id",
        "graph",
        "inputs",
        "name",
        "op_def",
        "outputs",
        "traceback",
        "type",
    )

    def __init__(self, op_type: str, name: str, tensor: Any, number: int, made: bool) -> None:
        self.type, self.name, self._id = op_type, name, number
        self.graph, self.op_def = tensor.graph, tensor.op.op_def
        self.inputs = self.outputs = [tensor]
        self.traceback = tensor.op.traceback if made else ()

    @property
    def __name__(self) -> str:
        return self.type

    def get_attr(self, name: str) -> Any:
        """Refuse: the value of a layer has no attributes.

        Raises:
            ValueError: Always, as `tf.Operation` does for an unknown attribute.
        """
        raise ValueError(f"{self.type} has no attribute {name!r}")


class LayerCall:
    """One call of a layer in a graph.

    Attributes:
        path: Names of the layers that were being called, outermost first, joined by ``/``.
        given: The first tensor among its arguments; None if it has none, or it is not the graph's.
        returned: The first tensor in its result; likewise.
        shared: Which of `MODULE_INPUT` and `MODULE_OUTPUT` is a tensor that occurs again in the
            arguments or the result, or that the layer was given and returns.
        entered: Number that orders it among the calls and returns of layers.
        left: That of its return.
        start: Id that the graph's next op had when it was called.
        stop: That when it returned.
        values: What it took and returned, by `MODULE_INPUT` and `MODULE_OUTPUT`, once it has.
    """

    __slots__ = (
        "entered",
        "given",
        "left",
        "path",
        "returned",
        "shared",
        "start",
        "stop",
        "values",
    )

    def __init__(self, path: str, args: Any, graph: Any) -> None:
        self.path, self.start = path, next_id(graph)
        self.entered = next(_NUMBERS)
        self.shared: set[str] = set()
        self.given = self._first(args, graph, MODULE_INPUT)
        self.returned: Any = None
        self.left = self.stop = 0
        self.values: dict[str, ModuleValue] = {}

    def finish(self, result: Any, graph: Any, suffix: str) -> None:
        """Store what it returned; `suffix` distinguishes its names from those of other calls."""
        self.left, self.stop = next(_NUMBERS), next_id(graph)
        returned = self.returned = self._first(result, graph, MODULE_OUTPUT)
        for op_type, tensor in ((MODULE_INPUT, self.given), (MODULE_OUTPUT, returned)):
            if tensor is None:
                continue
            made = op_type == MODULE_OUTPUT and operation_number(tensor.op) >= self.start
            if op_type == MODULE_OUTPUT and not made:
                self.shared.add(op_type)
            number = operation_number(tensor.op) if made else self.start
            name = f"{self.path}/{op_type}{suffix}"
            self.values[op_type] = ModuleValue(op_type, name, tensor, number, made)

    def _first(self, value: Any, graph: Any, op_type: str) -> Any:
        """Return the first tensor in a value as a tensor of the graph, or None."""
        found = arrays_in(value, ARRAYS)
        if not found or getattr(found[0], "dtype", None) == dtypes.resource:
            return None
        if sum(one is found[0] for one in found) > 1:
            self.shared.add(op_type)
        if is_symbolic(found[0]) and found[0].graph is graph:
            return found[0]
        captures = getattr(graph, "captures", ())
        return next((inner for outer, inner in captures if outer is found[0]), None)


class _Calls(list[LayerCall]):
    """The calls of layers in one graph, and how many each path has."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()


def calls_in(graph: Any) -> Sequence[LayerCall]:
    """Return the calls of layers that were recorded in a graph and have returned."""
    found: _Calls | tuple[()] = getattr(graph, _ATTRIBUTE, ())
    return found


class _Thread(threading.local):
    def __init__(self) -> None:
        #: The layers that are being called, with their names.
        self.layers: list[tuple[Any, str]] = []


_THREAD = _Thread()


#: Modules of Keras whose calls of layers are recorded.
RECORDED: list[str] = []


def record_layers() -> None:
    """Record calls of layers from now on, also if Keras is imported later."""

    def imported(name: str) -> None:
        kind = sys.modules[name].Layer
        kind.__call__ = _recording(kind.__call__)
        RECORDED.append(name)

    waiting = [name for name in LAYERS if name not in sys.modules]
    for name in LAYERS:
        if name not in waiting:
            imported(name)
    if waiting:
        ImportWatcher(waiting, imported).start()


def _recording(original: Callable[..., Any]) -> Callable[..., Any]:
    # There is only little code, since TensorFlow determines the lines of all frames at every op.
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = _enter(self, args, kwargs)
        try:
            result = original(self, *args, **kwargs)
            if call is not None:
                _leave(call, result)
            return result
        finally:
            _THREAD.layers.pop()

    # AutoGraph would otherwise convert the function while another one is traced.
    __call__.autograph_info__ = {}  # type: ignore[attr-defined]
    return functools.update_wrapper(__call__, original)


def _enter(layer: Any, args: Any, kwargs: Any) -> tuple[Any, LayerCall] | None:
    layers = _THREAD.layers
    is_again = bool(layers) and layers[-1][0] is layer  # A class calls that of its base class.
    layers.append((layer, str(getattr(layer, "name", type(layer).__name__))))
    if is_again or context.executing_eagerly():
        return None
    graph = ops.get_default_graph()
    path = "/".join(name for _, name in layers)
    return graph, LayerCall(path, [*args, *kwargs.values()], graph)


def _leave(entered: tuple[Any, LayerCall], result: Any) -> None:
    graph, call = entered
    known: _Calls | None = getattr(graph, _ATTRIBUTE, None)
    if known is None:
        known = _Calls()
        setattr(graph, _ATTRIBUTE, known)
    known.append(call)
    known.counts[call.path] += 1
    number = known.counts[call.path]
    call.finish(result, graph, f"#{number}" if number > 1 else "")
