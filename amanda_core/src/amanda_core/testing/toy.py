"""A framework of single numbers, for tests without a real one: operators, and a tape.

It replaces a real eager framework and does not know Amanda. It has the awkward parts of real ones:
inputs that are lists, defaults, several outputs, and ops with several backward nodes. Its driver is
`toy_driver`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

__all__ = [
    "Node",
    "Op",
    "Value",
    "add",
    "backward",
    "linear",
    "mul",
    "no_grad",
    "pair",
    "parameter",
    "relu",
    "scope",
    "total",
    "update",
]

Gradients = Sequence[float | None]
Run = Callable[[Gradients], Gradients]
Edge = tuple["Node", int]


class Node:
    """A node of the backward program, which returns one gradient for each of its edges."""

    def __init__(self, name: str, run: Run, edges: Sequence[Edge | None], arity: int = 1) -> None:
        self.name = name
        self.edges = list(edges)
        self.arity = arity
        #: Each hook gets the rest of the computation and the gradients; later hooks enclose earlier
        #: ones.
        self.wrappers: list[Callable[[Run, Gradients], Gradients]] = []
        self._run = run

    @property
    def __name__(self) -> str:
        """The name of the node, where frameworks have it."""
        return self.name

    def __call__(self, gradients: Gradients) -> Gradients:
        """Compute the gradients for the edges."""
        run: Run = self._differentiable
        for wrapper in self.wrappers:
            run = partial(wrapper, run)
        return run(gradients)

    def _differentiable(self, gradients: Gradients) -> Gradients:
        # A gradient that nobody needs is None, as in frameworks.
        results = self._run(gradients)
        edges = self.edges or [None] * len(results)
        return [r if e is not None else None for r, e in zip(results, edges, strict=True)]


class Value:
    """A scalar, its origin, and its gradient if it is a leaf that needs one."""

    def __init__(
        self, data: float, edge: Edge | None = None, *, name: str = "", requires_grad: bool = False
    ) -> None:
        self.data = data
        self.name = name
        self.grad: float | None = None
        if requires_grad:
            edge = (Node("AccumulateGrad", self._accumulate, ()), 0)
        self.edge = edge

    def _accumulate(self, gradients: Gradients) -> Gradients:
        self.grad = (self.grad or 0.0) + (gradients[0] or 0.0)
        return ()

    def __repr__(self) -> str:
        return f"Value({self.data})"

    def __float__(self) -> float:
        return self.data


def parameter(data: float, name: str = "") -> Value:
    """Return a leaf that gets a gradient."""
    return Value(data, name=name, requires_grad=True)


class _Local(threading.local):
    def __init__(self) -> None:
        self.recording = True
        self.path: list[str] = []


_local = _Local()


@contextmanager
def no_grad() -> Iterator[None]:
    """Disable recording for backward inside `with`."""
    before, _local.recording = _local.recording, False
    try:
        yield
    finally:
        _local.recording = before


# Operators.


@dataclass(frozen=True)
class Op:
    """An operator: its name, its input positions, its computation and its backward nodes."""

    name: str
    inputs: tuple[str, ...]
    compute: Callable[..., tuple[float, ...]]
    record: Callable[..., Node]

    @property
    def __name__(self) -> str:
        return self.name


def _edge(value: Value | None) -> Edge | None:
    return value.edge if value is not None else None


def _record_linear(x: Value, w: Value, b: Value | None) -> Node:
    product = Node(
        "ProductBackward",
        lambda g: ((g[0] or 0.0) * w.data, (g[0] or 0.0) * x.data),
        [x.edge, w.edge],
    )
    return Node("BiasBackward", lambda g: (g[0], g[0]), [(product, 0), _edge(b)])


ADD = Op(
    "add",
    ("x", "y"),
    lambda x, y: (x + y,),
    lambda x, y: Node("AddBackward", lambda g: (g[0], g[0]), [x.edge, y.edge]),
)
MUL = Op(
    "mul",
    ("x", "y"),
    lambda x, y: (x * y,),
    lambda x, y: Node(
        "MulBackward",
        lambda g: ((g[0] or 0.0) * y.data, (g[0] or 0.0) * x.data),
        [x.edge, y.edge],
    ),
)
LINEAR = Op("linear", ("x", "w", "b"), lambda x, w, b: (x * w + (b or 0.0),), _record_linear)
RELU = Op(
    "relu",
    ("x",),
    lambda x: (max(x, 0.0),),
    lambda x: Node("ReluBackward", lambda g: (g[0] if x.data > 0 else 0.0,), [x.edge]),
)
#: Two outputs, x + 1 and 2x, so that they and their gradients can be distinguished.
PAIR = Op(
    "pair",
    ("x",),
    lambda x: (x + 1.0, 2.0 * x),
    lambda x: Node("PairBackward", lambda g: ((g[0] or 0.0) + 2.0 * (g[1] or 0.0),), [x.edge], 2),
)
TOTAL = Op(
    "total",
    ("values",),
    lambda values: (sum(values),),
    lambda values: Node("TotalBackward", lambda g: [g[0]] * len(values), [v.edge for v in values]),
)
OPS = (ADD, MUL, LINEAR, RELU, PAIR, TOTAL)


def flat(arguments: Sequence[Any]) -> list[Value | None]:
    """Return arguments with the lists among them flattened."""
    opened: list[Value | None] = []
    for argument in arguments:
        opened.extend(argument if isinstance(argument, list) else [argument])
    return opened


def _data(argument: Any) -> Any:
    if isinstance(argument, list):
        return [value.data for value in argument]
    return argument.data if argument is not None else None


def dispatch(op: Op, arguments: list[Any]) -> tuple[Value, ...]:
    """Run an operator; every operator passes here."""
    results = op.compute(*map(_data, arguments))
    if not _local.recording or all(_edge(value) is None for value in flat(arguments)):
        return tuple(Value(result, None) for result in results)
    node = op.record(*arguments)
    return tuple(Value(result, (node, index)) for index, result in enumerate(results))


def add(x: Value, y: Value) -> Value:
    """Return the sum."""
    return dispatch(ADD, [x, y])[0]


def mul(x: Value, y: Value) -> Value:
    """Return the product."""
    return dispatch(MUL, [x, y])[0]


def linear(x: Value, w: Value, b: Value | None = None) -> Value:
    """Return x * w + b."""
    return dispatch(LINEAR, [x, w, b])[0]


def relu(x: Value) -> Value:
    """Return the larger of `x` and 0."""
    return dispatch(RELU, [x])[0]


def pair(x: Value) -> tuple[Value, ...]:
    """Return x + 1 and 2x, the two outputs of one operator."""
    return dispatch(PAIR, [x])


def total(values: list[Value]) -> Value:
    """Return the sum of the values in a list, which is one input."""
    return dispatch(TOTAL, [values])[0]


# Backward.


def _order(root: Node) -> list[Node]:
    """Return the nodes that `root` reaches, each before those that it feeds."""
    done: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node not in done:
            for edge in node.edges:
                if edge is not None:
                    visit(edge[0])
            done[node] = None

    visit(root)
    return list(reversed(done))


def _run_backward(value: Value, gradient: float) -> None:
    assert value.edge is not None, "nothing to differentiate"
    root, index = value.edge
    order = _order(root)
    arriving: dict[Node, list[float | None]] = {node: [None] * node.arity for node in order}
    arriving[root][index] = gradient
    for node in order:
        gradients = arriving[node]
        if all(g is None for g in gradients):
            continue
        results = node(gradients)
        for edge, result in zip(node.edges, results, strict=True):
            if edge is not None and result is not None:
                slots, slot = arriving[edge[0]], edge[1]
                old = slots[slot]
                slots[slot] = result if old is None else old + result


def backward(value: Value, gradient: float = 1.0, *, background: bool = False) -> None:
    """Run the backward program from a value, and leave gradients in the parameters.

    Args:
        value: The output.
        gradient: The gradient that arrives at it.
        background: Run in another thread, as engines with threads of their own do. An exception,
            which would end the process there, is lost here.
    """
    if not background:
        _run_backward(value, gradient)
        return

    def run() -> None:
        try:
            _run_backward(value, gradient)
        except BaseException:
            lost.append(value)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


#: What `backward` could not finish in the background.
lost: list[Value] = []


# Scopes and steps.


def scope_entered(path: str) -> None:
    """Do nothing when a scope is entered; drivers replace this."""


def scope_left(path: str) -> None:
    """Do nothing when a scope is left; drivers replace this."""


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Name a part of a model inside `with`."""
    _local.path.append(name)
    path = scope_path()
    scope_entered(path)
    try:
        yield
    finally:
        scope_left(path)
        _local.path.pop()


def scope_path() -> str:
    """Return the path of the current scope."""
    return ".".join(_local.path)


def update(parameters: Sequence[Value], rate: float) -> None:
    """End a step: take a step of gradient descent, and drop the gradients."""
    for value in parameters:
        value.data -= rate * (value.grad or 0.0)
        value.grad = None
