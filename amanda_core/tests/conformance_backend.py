"""A conformance backend of the toy framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amanda_core.testing import Backend, Gradients, Program, Value
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy.driver import REPLACED, ToyDriver


class ToyBackend(Backend):
    """Runs models of single numbers, with operators that are looked up when they are called."""

    driver = "toy"
    mode = "eager"
    shape = ()
    functions: Mapping[str, Callable[..., Any]] = {
        "add": toy.add,
        "mul": toy.mul,
        "relu": toy.relu,
    }

    plugin_type: type[ToyDriver] = ToyDriver

    def __init__(self, plugin: Any = None) -> None:
        self.plugin = self.plugin_type() if plugin is None else plugin

    def from_python(self, value: Value, like: Any = None) -> Any:
        assert isinstance(value, float)
        return value if isinstance(like, float) else toy.Value(value)

    def to_python(self, value: Any) -> Value:
        number = value if isinstance(value, float) else value.data
        assert isinstance(number, float)
        return number

    def parameter(self, value: Value) -> toy.Value:
        assert isinstance(value, float)
        return toy.parameter(value)

    def gradients(
        self, program: Program, inputs: Sequence[Value], seeds: Sequence[Value]
    ) -> Gradients:
        leaves = [*map(self.parameter, inputs), *program.parameters]
        for leaf in leaves:
            leaf.grad = None
        outputs = program.function(*leaves)
        # One pass from all outputs: a node over them, which is not an operator.
        loss = toy.Node("Loss", lambda gradients: list(seeds), [o.edge for o in outputs])  # type: ignore[arg-type]
        toy.backward(toy.Value(0.0, (loss, 0)))
        names = [*program.model.inputs, *program.model.parameters]
        found = {name: leaf.grad for name, leaf in zip(names, leaves, strict=True)}
        return Gradients([output.data for output in outputs], found)

    def scoped(
        self, name: str, function: Callable[..., Any], inner: Mapping[str, Callable[..., Any]]
    ) -> Callable[..., Any]:
        def module(*values: Any) -> Any:
            with toy.scope(name):
                return function(*values)

        return module

    def mixed(self) -> Callable[[], Sequence[Value]]:
        def program() -> list[Value]:
            x, w = toy.parameter(1.5), toy.parameter(2)
            more, twice = toy.pair(toy.linear(x, w))
            loss = toy.total([more, toy.mul(twice, toy.Value(3)), toy.relu(x)])
            toy.backward(loss)
            assert x.grad is not None
            assert w.grad is not None
            return [loss.data, x.grad, w.grad]

        return program

    def end_step(self, program: Program) -> None:
        toy.update([], 0.0)

    def versions(self) -> Mapping[str, str]:
        return {"toy": toy.__version__}

    def found(self) -> Mapping[str, object]:
        return {name: getattr(toy, name) for name in REPLACED}
