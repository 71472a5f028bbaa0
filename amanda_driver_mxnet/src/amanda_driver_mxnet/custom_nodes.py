"""Nodes of programs that call Python: an MXNet custom operator.

Owns the operator, which MXNet calls on its workers: routines forward, gates of gradients backward.
`hybrid`, `gradients` and `routines` decide where such nodes stand. MXNet cannot unregister an
operator, so this one stays; it does nothing in programs that have no such node.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mxnet
import numpy
from mxnet import autograd

from amanda_core import Session
from amanda_core.execution import Run, several
from amanda_core.threads import inside_routine
from amanda_driver_mxnet.facts import IN_GRAPHS

__all__ = ["OPERATOR", "Node", "passed"]

#: The name under which the custom operator is registered.
OPERATOR = "amanda"

#: Number -> node. Graphs refer to nodes by numbers; twins keep the nodes.
_NODES: weakref.WeakValueDictionary[int, Node] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@dataclass(eq=False)
class Node:
    """The computation of one node.

    Attributes:
        session: Returns the session that runs now.
        count: The number of inputs.
        run: Returns the outputs for the inputs.
        backward: Returns the gradients of the inputs for those of the outputs, None for zero; they
            pass through if it is None.
        types: dtypes of the outputs; those of the inputs if empty.
        shapes: Returns the shapes of the outputs for those of the inputs; the same if None.
        taped: Whether `run` is differentiated.
        is_np: Whether values are those of NumPy's interface.
        in_graph: Whether the node stands in a graph, whose memory MXNet plans.
    """

    session: Callable[[], Session]
    count: int
    run: Run
    backward: Run | None
    types: Sequence[str] = ()
    shapes: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    taped: bool = False
    is_np: bool = False
    in_graph: bool = False
    number: int = field(default_factory=lambda: next(_numbers))

    def __post_init__(self) -> None:
        _NODES[self.number] = self

    def given(self, values: Sequence[Any]) -> list[Any]:
        """Return values in the array interface of the program, NumPy's or the older one."""
        given = [value.as_np_ndarray() if self.is_np else value for value in values]
        for value in given if self.in_graph else ():
            IN_GRAPHS.set(value.handle, True)
        return given

    def deferring(self, run: Run, values: list[Any], default: Sequence[Any]) -> Sequence[Any]:
        """Run a function; if it fails, keep the exception for the program's thread."""
        try:
            return run(values)
        except BaseException as error:
            self.session().defer(error)
            return default


def passed(node: Node, values: Sequence[Any]) -> list[Any]:
    """Return the results of a node for arrays of an imperative program, on its tape."""
    if not values:
        return []
    node.is_np = isinstance(values[0], mxnet.np.ndarray)
    given = [value.as_nd_ndarray() for value in values]
    with inside_routine():  # Tools must not see this node: the program did not call it.
        found = several(mxnet.nd.Custom(*given, op_type=OPERATOR, number=str(node.number)))
    return [value.as_np_ndarray() if node.is_np else value for value in found]


class _Operator(mxnet.operator.CustomOp):  # type: ignore[misc]
    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node
        self.kept: tuple[list[Any], list[Any]] = [], []

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        node, values = self.node, self.node.given(in_data)
        default = [] if node.types else values
        if node.taped:
            # MXNet uses the memory of inputs again before the backward program.
            values = [value.copy() for value in values]
            for value in values:
                value.attach_grad()
            with autograd.record(is_train):
                results = several(node.deferring(node.run, values, default))
            self.kept = values, results
        else:
            with autograd.train_mode() if is_train else autograd.predict_mode():
                results = list(node.deferring(node.run, values, default))
        self._write(out_data, req, results)

    def backward(
        self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any
    ) -> None:
        node, found = self.node, self.node.given(out_grad)
        if node.backward is not None:
            found = list(node.deferring(node.backward, found, found))
        if node.taped:
            found = list(node.deferring(self._differentiate, found, []))
        self._write(in_grad, req, found)

    def _differentiate(self, gradients: list[Any]) -> list[Any]:
        values, results = self.kept
        autograd.backward(results, gradients)
        return [value.grad for value in values]

    def _write(self, targets: Any, requests: Any, values: list[Any]) -> None:
        values += [None] * (len(targets) - len(values))
        for target, request, value in zip(targets, requests, values, strict=True):
            if value is None:
                value = 0
            else:
                value = (value.as_nd_ndarray() if self.node.is_np else value).astype(target.dtype)
            self.assign(target, request, value)


@mxnet.operator.register(OPERATOR)
class _Property(mxnet.operator.CustomOpProp):  # type: ignore[misc]
    def __init__(self, number: str) -> None:
        super().__init__(need_top_grad=True)
        self.node = _NODES[int(number)]

    def list_arguments(self) -> list[str]:
        return [f"input{place}" for place in range(self.node.count)]

    def list_outputs(self) -> list[str]:
        return [f"output{place}" for place in range(len(self.node.types) or self.node.count)]

    def infer_shape(self, in_shape: Any) -> tuple[Any, Any, Any]:
        shapes = self.node.shapes
        return in_shape, in_shape if shapes is None else list(shapes(in_shape)), []

    def infer_type(self, in_type: Any) -> tuple[Any, Any, Any]:
        return in_type, [numpy.dtype(name).type for name in self.node.types] or in_type, []

    def declare_backward_dependency(self, out_grad: Any, in_data: Any, out_data: Any) -> Any:
        return out_grad

    def create_operator(self, ctx: Any, shapes: Any, dtypes: Any) -> _Operator:
        return _Operator(self.node)
