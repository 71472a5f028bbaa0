"""tinytape as the conformance kit uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import tinytape
from amanda_core.testing import Backend, Gradients, Program, Value
from amanda_driver_tinytape.plugin import HOOKS
from tinytape import Tensor


class TinytapeBackend(Backend):
    """Backend of tinytape, which has one mode."""

    driver = "tinytape"
    mode = "eager"
    functions: Mapping[str, Callable[..., Any]] = {
        "add": tinytape.add,
        "mul": tinytape.mul,
        "relu": tinytape.relu,
        "matmul": tinytape.matmul,
        "exp": tinytape.exp,
        "tanh": tinytape.tanh,
        "sum": tinytape.total,
    }
    plugin = HOOKS  # So that the driver need not be installed.

    def from_python(self, value: Value, like: Any = None) -> Any:
        # Gradients are plain arrays.
        tensor = Tensor(value)
        return tensor if like is None or isinstance(like, Tensor) else tensor.data

    def to_python(self, value: Any) -> Value:
        found: Value = (value.data if isinstance(value, Tensor) else value).tolist()
        return found

    def parameter(self, value: Value) -> Tensor:
        return tinytape.parameter(value)

    def gradients(
        self, program: Program, inputs: Sequence[Value], seeds: Sequence[Value]
    ) -> Gradients:
        leaves = [*map(tinytape.parameter, inputs), *program.parameters]
        for leaf in program.parameters:
            leaf.source.grad = None
        outputs = program.function(*leaves)
        tinytape.backward(outputs, seeds)
        names = [*program.model.inputs, *program.model.parameters]
        return Gradients(
            [self.to_python(output) for output in outputs],
            {name: self.to_python(leaf.grad) for name, leaf in zip(names, leaves, strict=True)},
        )

    def mixed(self) -> Callable[[], Sequence[Value]]:
        def program() -> list[Value]:
            random = np.random.default_rng(3)
            x = tinytape.parameter(random.random((2, 3)), "x")
            w = tinytape.parameter(random.integers(4, size=(3, 2)), "w")
            loss = tinytape.total(tinytape.tanh(tinytape.matmul(x, w)))
            tinytape.backward([loss], [1.0])
            assert x.grad is not None
            return [loss.data.tolist(), x.grad.tolist()]

        return program

    def end_step(self, program: Program) -> None:
        tinytape.sgd([], 0.1)
