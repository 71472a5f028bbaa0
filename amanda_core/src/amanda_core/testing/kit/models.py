"""Small models as graphs of common operator types, independent of any framework.

Owns the models whose operator sequences the suite knows, and the numbers that they run on.
`backend` builds them, and `oracle` computes what they return.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

__all__ = ["ARITY", "CORE_TYPES", "MODELS", "Model", "Node", "Value", "numbers"]

#: A number or nested lists of numbers.
Value = float | list["Value"]

#: Words that models are made of -> how many operands each takes.
ARITY: Mapping[str, int] = {
    "add": 2,
    "mul": 2,
    "relu": 1,
    "matmul": 2,
    "conv2d": 2,
    "tanh": 1,
    "exp": 1,
    "sum": 1,
}
#: What every backend has to have. The others are tested where a backend offers them.
CORE_TYPES = frozenset({"add", "mul", "relu"})

# Multiples of 1/4: short chains of sums and products of them are exact in single precision. Every
# third is positive, so that models of single numbers run `relu` where it has a slope.
_POOL = (1.5, -2.25, 0.75, 0.5, 1.0, -2.0, 1.25, -0.5, 1.75, -1.5, 0.25)


@dataclass(frozen=True)
class Node:
    """One operator call.

    Attributes:
        result: Name of what it computes.
        common_type: The operator, one of `ARITY`.
        operands: Names of inputs, parameters or earlier results.
        scope: Path of the module that it runs in, parts joined by ``/``; empty outside any.
    """

    result: str
    common_type: str
    operands: tuple[str, ...]
    scope: str = ""


@dataclass(frozen=True)
class Model:
    """A model: its nodes in the order in which a program would call them.

    Attributes:
        name: An identifier, which names the generated program too.
        inputs: Names of the inputs.
        parameters: Names of the parameters.
        nodes: The operators.
        outputs: Names of the results that the program returns.
        times: How often the nodes run in a loop, the first output taking the first input's place.
        shapes: Name -> shape of the inputs and parameters that have another one than the rest.
    """

    name: str
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    times: int = 1
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)

    @property
    def common_types(self) -> frozenset[str]:
        """The common types of the operators."""
        return frozenset(node.common_type for node in self.nodes)

    @property
    def sequence(self) -> list[str]:
        """The common types of the operators in the order of execution."""
        return [node.common_type for node in self.nodes] * self.times

    def node(self, result: str) -> Node:
        """Return the node that computes `result`."""
        return next(node for node in self.nodes if node.result == result)

    def values(self, shape: Sequence[int]) -> dict[str, Value]:
        """Return numbers for the inputs and parameters, a different one at each place."""
        names = self.inputs + self.parameters
        return {
            name: numbers(self.shapes.get(name, shape), 3 * place)
            for place, name in enumerate(names)
        }

    def seeds(self, shape: Sequence[int]) -> list[Value]:
        """Return gradients that arrive at the outputs, with no number twice."""
        return [
            numbers(() if self.node(name).common_type == "sum" else shape, 9 + 3 * place)
            for place, name in enumerate(self.outputs)
        ]

    def with_nodes(self, *nodes: Node) -> Model:
        """Return a model with these nodes."""
        return replace(self, nodes=nodes)


def numbers(shape: Sequence[int], start: int = 0) -> Value:
    """Return nested lists of `shape`, filled from a fixed sequence of numbers.

    >>> numbers((2, 2), 1)
    [[-2.25, 0.75], [0.5, 1.0]]
    """
    row = itertools.islice(itertools.cycle(_POOL), start, None)

    def filled(rest: Sequence[int]) -> Value:
        return [filled(rest[1:]) for _ in range(rest[0])] if rest else next(row)

    return filled(shape)


_H = Node("h", "mul", ("x", "w"))

MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        # One op after the other, each of another type.
        Model(
            "chain",
            ("x",),
            ("w", "b"),
            (_H, Node("a", "add", ("h", "b")), Node("y", "relu", ("a",))),
            ("y",),
        ),
        # A value with two readers.
        Model(
            "diamond",
            ("x",),
            ("w",),
            (_H, Node("r", "relu", ("h",)), Node("y", "add", ("r", "h"))),
            ("y",),
        ),
        # A parameter with two readers.
        Model("tied", ("x",), ("w",), (_H, Node("y", "add", ("h", "w"))), ("y",)),
        # Two equal ops in a row.
        Model("twins", ("x",), ("w",), (_H, Node("y", "mul", ("h", "w"))), ("y",)),
        # One layer several times.
        Model("loop", ("x",), ("w",), (_H, Node("y", "relu", ("h",))), ("y",), times=3),
        # Two results, one of which is computed from the other.
        Model("fork", ("x",), ("w", "b"), (_H, Node("y", "add", ("h", "b"))), ("y", "h")),
        # Modules in a module.
        Model(
            "scoped",
            ("x",),
            ("w", "b"),
            (
                Node("h", "mul", ("x", "w"), "net/one"),
                Node("a", "add", ("h", "b"), "net/two"),
                Node("y", "relu", ("a",), "net"),
            ),
            ("y",),
        ),
        # A matrix product, if a backend has it.
        Model(
            "dense",
            ("x",),
            ("w", "b"),
            (
                Node("h", "matmul", ("x", "w")),
                Node("a", "add", ("h", "b")),
                Node("y", "tanh", ("a",)),
            ),
            ("y",),
        ),
        # A reduction to one number, if a backend has it.
        Model(
            "reduced",
            ("x",),
            ("w",),
            (_H, Node("e", "exp", ("h",)), Node("y", "sum", ("e",))),
            ("y",),
        ),
    )
}
