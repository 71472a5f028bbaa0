"""`Rig`: the fixture of the suite's tests, with a backend, its models and small tools.

Owns how the suite watches and edits ops of any framework: by common operator types, and by routines
that convert values to Python numbers and back. It does not decide what is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from amanda_core.engine.context import OpContext
from amanda_core.engine.tool import Tool
from amanda_core.interface.driver import DriverInfo
from amanda_core.interface.namespace import Namespace
from amanda_core.testing.kit.backend import Backend, Gradients, Transformed
from amanda_core.testing.kit.models import MODELS, Model, Value
from amanda_core.testing.kit.oracle import Edit, Edits, Trace, differentiate, evaluate, mapped, same
from amanda_core.testing.kit.program import Program

__all__ = ["Built", "Rig", "Routine"]

Routine = Callable[..., Any]


@dataclass
class Built:
    """A model built for a backend, and the numbers that it runs on."""

    backend: Backend
    model: Model
    program: Program
    values: dict[str, Value]

    @property
    def inputs(self) -> list[Value]:
        """Numbers of the inputs."""
        return [self.values[name] for name in self.model.inputs]

    @property
    def seeds(self) -> list[Value]:
        """Gradients that arrive at the outputs."""
        return self.model.seeds(self.backend.shape)

    def run(self) -> list[Value]:
        """Run it forward and return the outputs."""
        return self.backend.run(self.program, self.inputs)

    def gradients(self) -> Gradients:
        """Run it forward and backward, and return outputs and gradients."""
        return self.backend.gradients(self.program, self.inputs, self.seeds)

    def expected(self, edits: Edits | None = None, model: Model | None = None) -> Trace:
        """Return the oracle's results for it, edited or as another model."""
        return differentiate(model or self.model, self.values, self.seeds, edits)


class Rig:
    """A backend, with helpers for one test.

    Attributes:
        backend: The backend under test.
        info: Its driver's description of itself.
        namespaces: The namespaces of the contexts so far, for the report.
    """

    def __init__(
        self, backend: Backend, info: DriverInfo, namespaces: list[str] | None = None
    ) -> None:
        self.backend = backend
        self.info = info
        self.namespaces = [] if namespaces is None else namespaces

    # Models.

    def build(self, name: str) -> Built:
        """Build the model of that name."""
        return self.build_model(MODELS[name])

    def build_model(self, model: Model) -> Built:
        """Build a model."""
        values = model.values(self.backend.shape)
        return Built(self.backend, model, self.backend.build(model, values), values)

    def transform(self, name: str, transformation: str) -> tuple[Built, Transformed]:
        """Build a model inside a transformation; skip the test if the backend provides none."""
        built = self.build(name)
        given = self.backend.transformed(built.program)
        if transformation not in given:
            pytest.skip(f"{self.backend.title} gives the suite no program in a {transformation!r}")
        found = given[transformation]
        return replace(built, program=found.program), found

    def build_recomputed(self, name: str) -> Built:
        """Build the model of that name so that backward runs it again."""
        model = MODELS[name]
        values = model.values(self.backend.shape)
        return Built(self.backend, model, self.backend.build_recomputed(model, values), values)

    # Tools.

    def is_ours(self, context: OpContext, common_types: Sequence[str] | frozenset[str]) -> bool:
        """Return True for a forward op of the model, by its common type: frameworks add ops."""
        if Namespace.parse(context.namespace).framework != self.backend.driver:
            return False
        if (
            not context.is_forward()
            or context.zone != "model"
            or context["type"] not in common_types
        ):
            return False
        if context.namespace not in self.namespaces:
            self.namespaces.append(context.namespace)
        return True

    def tool(
        self,
        analyse: Callable[[OpContext], Any],
        *common_types: str,
        after: bool = False,
    ) -> Tool:
        """Return a tool that analyses the forward ops of these common types."""

        def routine(context: OpContext) -> None:
            if self.is_ours(context, common_types):
                analyse(context)

        tool = Tool()
        tool.add_inst_for_op(routine, require_outputs=after)
        return tool

    def asking(self, ask: str, routine: Routine, *common_types: str, **arguments: Any) -> Tool:
        """Return a tool that makes one request at each op of these common types.

        Args:
            ask: A method of `OpContext`, such as ``insert_before_op``.
            routine: The instrumentation routine.
            *common_types: The operators.
            **arguments: Positions, and keyword arguments of the routine.
        """
        return self.tool(
            lambda context: getattr(context, ask)(routine, **arguments),
            *common_types,
            after=ask == "insert_after_op",
        )

    def recording(self, executed: list[tuple[str, int]], *common_types: str) -> Tool:
        """Return a tool that records the common type and op id of each execution."""

        def analyse(context: OpContext) -> None:
            common_type, number = context["type"], context.get_op_id()

            def note(*values: Any) -> None:
                executed.append((common_type, number))

            context.insert_before_op(note)

        return self.tool(analyse, *common_types)

    def edit(self, change: Edit) -> Routine:
        """Return a routine that changes each number of each value."""

        def routine(*values: Any) -> Any:
            return [self.changed(change, value) for value in values]

        return routine

    def changed(self, change: Edit, value: Any) -> Any:
        """Return a value of the framework with each number changed."""
        return self.backend.from_python(mapped(change, self.backend.to_python(value)), like=value)

    def taking(self, seen: list[Any]) -> Routine:
        """Return a routine that records its values as numbers: one value, or a list of several."""

        def routine(*values: Any) -> None:
            found = [None if value is None else self.backend.to_python(value) for value in values]
            seen.append(found[0] if len(found) == 1 else found)

        return routine

    # Comparison.

    def same(self, found: Any, expected: Any) -> bool:
        """Return True if numbers agree within the backend's tolerance."""
        return same(found, expected, self.backend.tolerance)

    def is_run(self, outputs: Any, built: Built, edits: Edits | None = None) -> bool:
        """Return True if these are the outputs of a model that runs with these edits."""
        return self.same(outputs, evaluate(built.model, built.values, edits).outputs)
