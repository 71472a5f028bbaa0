"""A framework of single numbers, for tests without a real one: operators, and a tape.

It stands for a real framework and does not know Amanda. It has the awkward parts of real ones:
inputs that are lists, defaults, several outputs, and ops with several backward nodes. It runs
operators at once, or hands them to what traces a function. Its driver is `toy_driver`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

__version__ = "1.2.3"

Gradients = Sequence[float | None]
Run = Callable[[Gradients], Gradients]
Edge = tuple["Node", int]


_made = itertools.count()


class Node:
    """A node of the backward program, which returns one gradient for each of its edges."""

    def __init__(self, name: str, run: Run, edges: Sequence[Edge | None], arity: int = 1) -> None:
        self.name = name
        self.edges = list(edges)
        self.arity = arity
        self.number = next(_made)
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


@dataclass(eq=False, repr=False)
class Value:
    """A scalar, its origin, and its gradient if it is a leaf that needs one."""

    data: float
    edge: Edge | None = None
    name: str = ""
    grad: float | None = None

    @property
    def is_parameter(self) -> bool:
        """True for a leaf that gets a gradient."""
        return self.edge is not None and self.edge[0].name == "AccumulateGrad"

    def __repr__(self) -> str:
        return f"Value({self.data})"

    def __float__(self) -> float:
        return self.data


def parameter(data: float, name: str = "") -> Value:
    """Return a leaf that gets a gradient."""
    leaf = Value(data, name=name)

    def accumulate(gradients: Gradients) -> Gradients:
        leaf.grad = (leaf.grad or 0.0) + (gradients[0] or 0.0)
        return ()

    leaf.edge = (Node("AccumulateGrad", accumulate, ()), 0)
    return leaf


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


def _recorded(name: str, pull: Callable[..., Gradients], arity: int = 1) -> Callable[..., Node]:
    """Return how an op with one backward node is recorded.

    Args:
        name: The name of the node.
        pull: Returns the gradients of the inputs, given those of the outputs and the inputs.
        arity: How many outputs there are.
    """

    def record(*values: Value) -> Node:
        def run(gradients: Gradients) -> Gradients:
            return pull(*[gradient or 0.0 for gradient in gradients], *values)

        return Node(name, run, [_edge(value) for value in flat(values)], arity)

    return record


def _record_linear(x: Value, w: Value, b: Value | None) -> Node:
    product = _recorded("ProductBackward", lambda g, x, w: (g * w.data, g * x.data))(x, w)
    return Node("BiasBackward", lambda g: (g[0], g[0]), [(product, 0), _edge(b)])


ADD = Op("add", ("x", "y"), lambda x, y: (x + y,), _recorded("AddBackward", lambda g, x, y: (g, g)))
MUL = Op(
    "mul",
    ("x", "y"),
    lambda x, y: (x * y,),
    _recorded("MulBackward", lambda g, x, y: (g * y.data, g * x.data)),
)
LINEAR = Op("linear", ("x", "w", "b"), lambda x, w, b: (x * w + (b or 0.0),), _record_linear)
RELU = Op(
    "relu",
    ("x",),
    lambda x: (max(x, 0.0),),
    _recorded("ReluBackward", lambda g, x: (g if x.data > 0 else 0.0,)),
)
#: Two outputs, x + 1 and 2x, so that they and their gradients can be distinguished.
PAIR = Op(
    "pair",
    ("x",),
    lambda x: (x + 1.0, 2.0 * x),
    _recorded("PairBackward", lambda first, second, x: (first + 2.0 * second,), 2),
)
TOTAL = Op(
    "total",
    ("values",),
    lambda values: (sum(values),),
    _recorded("TotalBackward", lambda g, values: [g] * len(values)),
)


def flat(arguments: Sequence[Any]) -> list[Any]:
    """Return arguments with the lists among them flattened."""
    opened: list[Any] = []
    mapped(opened.append, arguments)
    return opened


def mapped(function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
    """Return the results of a function of each argument, and of each value in a list."""
    return [[*map(function, one)] if isinstance(one, list) else function(one) for one in arguments]


class _Local(threading.local):
    def __init__(self) -> None:
        self.recording = True
        self.path: list[str] = []
        self.write: Callable[[Op, list[Any]], tuple[Value, ...]] | None = None


_local = _Local()


def reset() -> None:
    """Forget the scopes and modes of this thread, in which an exception may have left it."""
    _local.__init__()  # type: ignore[misc]


def is_recording() -> bool:
    """Return True if this thread records for backward."""
    return _local.recording


def record(enabled: bool) -> None:
    """Let this thread record for backward, or not."""
    _local.recording = enabled


@contextmanager
def no_grad() -> Iterator[None]:
    """Disable recording for backward inside `with`."""
    before = _local.recording
    try:
        _local.recording = False
        yield
    finally:
        _local.recording = before


def execute(op: Op, arguments: list[Any]) -> tuple[Value, ...]:
    """Compute an operator, and record it for backward."""
    results = op.compute(*mapped(lambda value: value and value.data, arguments))
    if not _local.recording or all(_edge(value) is None for value in flat(arguments)):
        return tuple(Value(result, None) for result in results)
    node = op.record(*arguments)
    return tuple(Value(result, (node, index)) for index, result in enumerate(results))


def dispatch(op: Op, arguments: list[Any]) -> tuple[Value, ...]:
    """Run an operator, or trace it; every operator passes here."""
    return (_local.write or execute)(op, arguments)


@contextmanager
def tracing(write: Callable[[Op, list[Any]], Any]) -> Iterator[None]:
    """Call `write` instead of computing operators inside `with`."""
    before, _local.write = _local.write, write
    try:
        yield
    finally:
        _local.write = before


def is_tracing() -> bool:
    """Return True while operators of this thread are traced."""
    return _local.write is not None


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


def _run_backward(value: Value, gradient: float) -> None:
    assert value.edge is not None, "nothing to differentiate"
    arriving: dict[Node, list[float | None]] = {}
    edges: Sequence[Edge | None] = [value.edge]
    gradients: Gradients = [gradient]
    while True:
        for edge, found in zip(edges, gradients, strict=True):
            if edge is not None and found is not None:
                slots = arriving.setdefault(edge[0], [None] * edge[0].arity)
                slots[edge[1]] = found + (slots[edge[1]] or 0.0)
        if not arriving:
            return
        # Each node comes before those that it feeds, which are older.
        node = max(arriving, key=lambda node: node.number)
        edges, gradients = node.edges, node(arriving.pop(node))


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
    with ThreadPoolExecutor() as threads:
        if threads.submit(_run_backward, value, gradient).exception() is not None:
            lost.append(value)


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
    outer = _local.path
    try:
        _local.path = [*outer, name]
        path = scope_path()
        scope_entered(path)
        yield
        scope_left(path)
    finally:
        _local.path = outer


def scope_path() -> str:
    """Return the path of the current scope."""
    return ".".join(_local.path)


def update(parameters: Sequence[Value], rate: float) -> None:
    """End a step: take a step of gradient descent, and drop the gradients."""
    for value in parameters:
        value.data -= rate * (value.grad or 0.0)
        value.grad = None
