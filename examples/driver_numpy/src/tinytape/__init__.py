"""A small framework on NumPy: tensors, operators, and a tape for gradients.

It stands for the framework that you write a driver for, and knows nothing of Amanda. All operators
go through `run`; `backward` walks the nodes that `run` left behind.
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
    "matmul",
    "mul",
    "no_grad",
    "parameter",
    "relu",
    "run",
    "sgd",
    "tanh",
    "total",
]

Array = npt.NDArray[np.float64]
#: From the gradient of an op's output to those of its inputs.
Pull = Callable[[Array], Sequence[Array]]


class Leaf:
    """Where the gradient of a parameter is summed up."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.grad: Array | None = None


class Node:
    """One op on the tape.

    Attributes:
        name: Name of the backward operator.
        sources: Where the gradient of each input goes; None where nobody wants it.
        pull: Computes the gradients of the inputs; None for inputs that have no source.
    """

    def __init__(self, name: str, sources: Sequence[Leaf | Node | None], pull: Pull) -> None:
        self.name = name
        self.sources = tuple(sources)

        def wanted(gradient: Array) -> list[Array | None]:
            pairs = zip(pull(gradient), self.sources, strict=True)
            return [found if source is not None else None for found, source in pairs]

        self.pull: Callable[[Array], Sequence[Array | None]] = wanted


class Tensor:
    """An array and where it came from: a node, a leaf, or nowhere that matters."""

    def __init__(self, data: Any, source: Leaf | Node | None = None) -> None:
        self.data: Array = np.asarray(data, np.float64)
        self.source = source

    def __repr__(self) -> str:
        return f"Tensor({self.data.tolist()})"

    @property
    def grad(self) -> Array | None:
        """The gradient of a parameter."""
        return self.source.grad if isinstance(self.source, Leaf) else None


def parameter(data: Any, name: str = "") -> Tensor:
    """A tensor that wants a gradient."""
    return Tensor(data, Leaf(name))


class _Local(threading.local):
    recording = True


_local = _Local()


@contextmanager
def no_grad() -> Iterator[None]:
    """Extent in which nothing is put on the tape."""
    before, _local.recording = _local.recording, False
    try:
        yield
    finally:
        _local.recording = before


@dataclass(frozen=True)
class Operator:
    """An operator: its name, its inputs' names, and what it computes, with the pull of it."""

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
    """Run an operator and put it on the tape; every call of one goes through here."""
    result, pull = operator.compute(*(tensor.data for tensor in inputs))
    sources = [tensor.source for tensor in inputs]
    if not _local.recording or all(source is None for source in sources):
        return Tensor(result)
    return Tensor(result, Node(f"{operator.name}_pull", sources, pull))


def add(x: Tensor, y: Tensor) -> Tensor:
    """The sum of two tensors."""
    return run(ADD, (x, y))


def mul(x: Tensor, y: Tensor) -> Tensor:
    """The product of two tensors, element by element."""
    return run(MUL, (x, y))


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """The product of two matrices."""
    return run(MATMUL, (x, y))


def relu(x: Tensor) -> Tensor:
    """The larger of each element and 0."""
    return run(RELU, (x,))


def exp(x: Tensor) -> Tensor:
    """The exponential of each element."""
    return run(EXP, (x,))


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent of each element."""
    return run(TANH, (x,))


def total(x: Tensor) -> Tensor:
    """The sum of all elements."""
    return run(TOTAL, (x,))


def _order(roots: Sequence[Tensor]) -> list[Node]:
    """The nodes that the roots were made by, each before those that made its inputs."""
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
    """Add to each parameter's gradient what it has to do with `outputs`."""
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
    """One step of gradient descent; the gradients are used up."""
    for tensor in parameters:
        if isinstance(tensor.source, Leaf) and tensor.source.grad is not None:
            tensor.data = tensor.data - rate * tensor.source.grad
            tensor.source.grad = None
