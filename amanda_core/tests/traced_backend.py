"""A conformance backend of compiled functions of the toy framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amanda_core.testing import Model, Program, Transformed, Value
from amanda_core.testing.toy import framework as toy

from . import traced_functions as compiler
from .conformance_backend import ToyBackend
from .traced_driver import TracedDriver


class TracedBackend(ToyBackend):
    """Builds each model as a compiled function."""

    mode = "compiled"
    plugin_type = TracedDriver

    def build(self, model: Model, values: Mapping[str, Value]) -> Program:
        program = super().build(model, values)
        program.extra, program.function = program.function, compiler.Compiled(program.function)
        return program

    def transformed(self, program: Program) -> Mapping[str, Transformed]:
        body = program.extra

        def other(*values: Any) -> Sequence[Any]:
            return [values[0]]

        def transformed(function: Callable[..., Any], calls: int) -> Transformed:
            compiled = compiler.Compiled(function)
            return Transformed(Program(program.model, compiled, program.parameters, body), calls)

        return {
            "branch": transformed(lambda *v: compiler.branch(toy.Value(1.0), body, other, *v), 1),
            "loop": transformed(lambda *v: compiler.repeat(3, body, *v), 3),
            "map": transformed(lambda *v: compiler.repeat(2, body, *v), 2),
        }

    def traces(self, program: Program) -> int:
        # With those of the bodies, which are compiled by themselves.
        assert isinstance(program.function, compiler.Compiled)
        return program.function.traces + compiler.compiled(program.extra).traces

    def mixed(self) -> Callable[[], Sequence[Value]]:
        @compiler.Compiled
        def function(x: Any, integer: Any) -> Sequence[Any]:
            more, twice = toy.pair(toy.mul(x, integer))
            return [toy.add(more, integer), toy.relu(twice)]

        return lambda: [self.to_python(v) for v in function(toy.Value(1.75), toy.Value(3))]

    def found(self) -> Mapping[str, object]:
        return {**super().found(), "run": compiler.run}
