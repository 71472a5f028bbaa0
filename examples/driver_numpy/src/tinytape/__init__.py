"""A small framework on NumPy: tensors, operators, and a tape for gradients.

It stands for the framework for which you write a driver, and does not depend on Amanda. All
operators go through `run`; `backward` walks the nodes that `run` has recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__version__ = "0.1.0"

__all__ = [
    "Leaf",
    "Node",
    "Operator",
    "Tensor",
    "add",
    "backward",
    "exp",
    "is_recording",
    "matmul",
    "mul",
    "no_grad",
    "parameter",
    "relu",
    "run",
    "set_recording",
    "sgd",
    "tanh",
    "total",
]

Array = npt.NDArray[np.float64]
#: Computes the gradients of an op's inputs from the gradient of its output.
Pull = Callable[[Array], Sequence[Array]]


class Leaf:
    """Accumulates the gradient of a parameter."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.grad: Array | None = None


class Node:
    """One op on the tape.

    Attributes:
        name: Name of the backward operator.
        sources: Destination of each input's gradient; None if it is not needed.
        pull: Computes the gradients of the inputs; None for inputs without a source.
    """

    def __init__(self, name: str, sources: Sequence[Leaf | Node | None], pull: Pull) -> None:
        self.name = name
        self.sources = tuple(sources)

        def wanted(gradient: Array) -> list[Array | None]:
            pairs = zip(pull(gradient), self.sources, strict=True)
            return [found if source is not None else None for found, source in pairs]

        self.pull: Callable[[Array], Sequence[Array | None]] = wanted


class Tensor:
    """An array and its source: a node, a leaf, or None if no gradient is needed."""

    def __init__(self, data: Any, source: Leaf | Node | None = None) -> None:
        self.data: Array = np.asarray(data, np.float64)
        self.source = source

    def __repr__(self) -> str:
        return f"Tensor({self.data.tolist()})"

    @property
    def grad(self) -> Array | None:
        """Return the gradient of a parameter."""
        return self.source.grad if isinstance(self.source, Leaf) else None


def parameter(data: Any, name: str = "") -> Tensor:
    """Return a tensor that requires a gradient."""
    return Tensor(data, Leaf(name))


class _Local(threading.local):
    recording = True


_local = _Local()


def is_recording() -> bool:
    """Return True if operators of this thread are recorded on the tape."""
    return _local.recording


def set_recording(recording: bool) -> None:
    """Record operators of this thread on the tape, or do not."""
    _local.recording = recording


@contextmanager
def no_grad() -> Iterator[None]:
    """Disable recording on the tape."""
    before, _local.recording = _local.recording, False
    try:
        yield
    finally:
        _local.recording = before


@dataclass(frozen=True)
class Operator:
    """An operator: its name, the names of its inputs, and a function that returns output
    and pull.
    """

    name: str
    inputs: tuple[str, ...]
    compute: Callable[..., tuple[Array, Pull]]


ADD = Operator("add", ("x", "y"), lambda x, y: (x + y, lambda g: (g, g)))
MUL = Operator("mul", ("x", "y"), lambda x, y: (x * y, lambda g: (g * y, g * x)))
MATMUL = Operator("matmul", ("x", "y"), lambda x, y: (x @ y, lambda g: (g @ y.T, x.T @ g)))
RELU = Operator("relu", ("x",), lambda x: (np.maximum(x, 0.0), lambda g: (g * (x > 0),)))
EXP = Operator("exp", ("x",), lambda x: (np.exp(x), lambda g: (g * np.exp(x),)))
TANH = Operator("tanh", ("x",), lambda x: (np.tanh(x), lambda g: (g * (1 - np.tanh(x) ** 2),)))
TOTAL = Operator("total", ("x",), lambda x: (np.asarray(x.sum()), lambda g: (np.full(x.shape, g),)))


def run(operator: Operator, inputs: Sequence[Tensor]) -> Tensor:
    """Execute an operator and record it on the tape; every operator is called through this
    function.
    """
    result, pull = operator.compute(*(tensor.data for tensor in inputs))
    sources = [tensor.source for tensor in inputs]
    if not _local.recording or all(source is None for source in sources):
        return Tensor(result)
    return Tensor(result, Node(f"{operator.name}_pull", sources, pull))


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of two tensors."""
    return run(ADD, (x, y))


def mul(x: Tensor, y: Tensor) -> Tensor:
    """Return the elementwise product of two tensors."""
    return run(MUL, (x, y))


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Return the product of two matrices."""
    return run(MATMUL, (x, y))


def relu(x: Tensor) -> Tensor:
    """Return the larger of each element and 0."""
    return run(RELU, (x,))


def exp(x: Tensor) -> Tensor:
    """Return the exponential of each element."""
    return run(EXP, (x,))


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent of each element."""
    return run(TANH, (x,))


def total(x: Tensor) -> Tensor:
    """Return the sum of all elements."""
    return run(TOTAL, (x,))


def _order(roots: Sequence[Tensor]) -> list[Node]:
    """Return the nodes behind the roots, each before the nodes that produced its inputs."""
    done: dict[Node, None] = {}

    def visit(source: Leaf | Node | None) -> None:
        if isinstance(source, Node) and source not in done:
            for inner in source.sources:
                visit(inner)
            done[source] = None

    for root in roots:
        visit(root.source)
    return list(reversed(done))


def backward(outputs: Sequence[Tensor], gradients: Sequence[Any]) -> None:
    """Add the contribution of `outputs` to the gradient of each parameter."""
    arriving: dict[Leaf | Node, Array] = {}

    def send(source: Leaf | Node | None, gradient: Array | None) -> None:
        if source is not None and gradient is not None:
            arriving[source] = arriving[source] + gradient if source in arriving else gradient

    for output, gradient in zip(outputs, gradients, strict=True):
        send(output.source, np.asarray(gradient, np.float64))
    for node in _order(outputs):
        if node in arriving:
            for source, found in zip(node.sources, node.pull(arriving[node]), strict=True):
                send(source, found)
    for source, gradient in arriving.items():
        if isinstance(source, Leaf):
            source.grad = gradient if source.grad is None else source.grad + gradient


def sgd(parameters: Sequence[Tensor], rate: float) -> None:
    """Perform one step of gradient descent and clear the gradients."""
    for tensor in parameters:
        if isinstance(tensor.source, Leaf) and tensor.source.grad is not None:
            tensor.data = tensor.data - rate * tensor.source.grad
            tensor.source.grad = None
