"""A conformance backend of the framework that compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amanda_core.testing import Backend, Model, Program, Transformed, Value

from . import traced_framework as framework
from .traced_driver import TracedDriver


class TracedBackend(Backend):
    """Builds each model as a compiled function."""

    driver = "traced"
    mode = "compiled"
    shape = ()
    functions: Mapping[str, Callable[..., Any]] = {
        "add": framework.add,
        "mul": framework.mul,
        "relu": framework.relu,
    }

    def __init__(self, plugin: Any = None) -> None:
        self.plugin = TracedDriver() if plugin is None else plugin

    def from_python(self, value: Value, like: Any = None) -> framework.Value:
        assert isinstance(value, float)
        return framework.Value(value)

    def to_python(self, value: Any) -> Value:
        number: float = value.data
        return number

    def parameter(self, value: Value) -> framework.Parameter:
        assert isinstance(value, float)
        return framework.Parameter(value)

    def build(self, model: Model, values: Mapping[str, Value]) -> Program:
        program = super().build(model, values)
        program.extra, program.function = program.function, framework.Compiled(program.function)
        return program

    def transformed(self, program: Program) -> Mapping[str, Transformed]:
        body = program.extra

        def other(*values: Any) -> Sequence[Any]:
            return [values[0]]

        functions: dict[str, tuple[Callable[..., Any], int]] = {
            "branch": (
                lambda *v: framework.branch(framework.Value(1.0), body, other, *v),
                1,
            ),
            "loop": (lambda *v: framework.repeat(3, body, *v), 3),
            "map": (lambda *v: framework.mapped(body, 2, *v), 2),
        }
        return {
            name: Transformed(
                Program(program.model, framework.Compiled(function), program.parameters, body),
                calls,
            )
            for name, (function, calls) in functions.items()
        }

    def traces(self, program: Program) -> int:
        # With those of the bodies, which are compiled by themselves.
        assert isinstance(program.function, framework.Compiled)
        return program.function.traces + framework.compiled(program.extra).traces

    def mixed(self) -> Callable[[], Sequence[Value]]:
        @framework.Compiled
        def function(x: Any, integer: Any) -> Sequence[Any]:
            whole, rest = framework.split(framework.mul(x, integer))
            return [framework.add(whole, integer), framework.relu(rest)]

        def program() -> list[Value]:
            given = [framework.Value(1.75), framework.Value(3)]
            return [self.to_python(value) for value in function(*given)]

        return program
