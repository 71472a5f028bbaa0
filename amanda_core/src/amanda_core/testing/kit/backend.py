"""`Backend`: a description of how a framework runs a model, for the conformance kit.

Owns what the suite needs from a framework. Most authors of drivers write `functions`, `to_python`,
`from_python` and `gradients`. The rest has defaults for frameworks that are called from Python.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from amanda_core.interface.driver import DriverInfo
from amanda_core.plugins import discovery
from amanda_core.testing.kit.models import Model, Value
from amanda_core.testing.kit.program import Program, function_of

__all__ = ["Backend", "Gradients", "Transformed"]


@dataclass
class Gradients:
    """Results of a run with its backward program, as Python numbers.

    Attributes:
        outputs: The model's outputs.
        gradients: Name of an input or parameter -> its gradient.
    """

    outputs: list[Value]
    gradients: dict[str, Value] = field(default_factory=dict)


@dataclass
class Transformed:
    """A program inside a transformation of the framework that keeps its results.

    Attributes:
        program: The program that `Backend.run` runs, or `Backend.gradients` if `backward`.
        calls: How often each op of the program executes in one run.
        backward: Whether it must be run with its backward program, as for recomputation.
    """

    program: Program
    calls: int = 1
    backward: bool = False


class Backend(ABC):
    """One framework in one of its execution modes, as the suite uses it.

    Attributes:
        driver: `DriverInfo.name` of the driver under test, the first part of its namespaces.
        mode: The last part of the namespace of its contexts; empty for any.
        functions: Common operator type -> the framework's own function of values. Do not wrap it,
            because the line that calls it identifies the op. ``add``, ``mul`` and ``relu`` are
            required; the suite uses the other types of `models.ARITY` if they are given.
        shape: The shape of all values; ``()`` for a framework of single numbers.
        tolerance: Relative and absolute tolerance of results against the oracle.
        conv2d_layouts: Axes of the input and of the weight of ``functions["conv2d"]``.
        without: Capability that the driver declares -> why this mode lacks it.
        not_interrupted: Part of the names of files of the framework -> why it does not survive an
            exception at any of their lines, such as Ctrl-C.
        plugin: The driver's plugin, if the driver is not installed.
    """

    driver: ClassVar[str]
    mode: ClassVar[str] = ""
    functions: Mapping[str, Callable[..., Any]]
    shape: ClassVar[tuple[int, ...]] = (2, 2)
    tolerance: ClassVar[float] = 1e-5
    conv2d_layouts: ClassVar[tuple[str, str]] = ("NCHW", "OIHW")
    without: ClassVar[Mapping[str, str]] = {}
    not_interrupted: ClassVar[Mapping[str, str]] = {}
    plugin: Any = None

    @property
    def title(self) -> str:
        """The driver and the mode, for reports."""
        return f"{self.driver} {self.mode}".strip()

    # What an author writes.

    @abstractmethod
    def from_python(self, value: Value, like: Any = None) -> Any:
        """Return a value of the framework.

        Args:
            value: A number or nested lists.
            like: The value that a routine replaces by it. Only frameworks whose gradients have
                another type than their values need it.
        """

    @abstractmethod
    def to_python(self, value: Any) -> Value:
        """Return a value or gradient as a number or nested lists; also called inside routines."""

    def gradients(
        self, program: Program, inputs: Sequence[Value], seeds: Sequence[Value]
    ) -> Gradients:
        """Run a program and its backward program.

        Args:
            program: Made by `build`.
            inputs: Numbers for the inputs.
            seeds: The gradient that arrives at each output.

        Returns:
            Outputs, and gradients of all inputs and parameters.
        """
        raise NotImplementedError(f"{type(self).__name__} has no gradients()")

    # What an author may write.

    def parameter(self, value: Value) -> Any:
        """Return a parameter of a model, marked as needing a gradient if the framework has such
        marks.
        """
        return self.from_python(value)

    def build(self, model: Model, values: Mapping[str, Value]) -> Program:
        """Build a model; by default a Python function that calls `functions`.

        Args:
            model: The description.
            values: Numbers of the parameters, by name.
        """
        function = function_of(model, self.functions, self.scoped)
        return Program(model, function, [self.parameter(values[n]) for n in model.parameters])

    def run(self, program: Program, inputs: Sequence[Value]) -> list[Value]:
        """Run a program forward, and return its outputs as numbers."""
        outputs = program.function(*map(self.from_python, inputs), *program.parameters)
        return [self.to_python(output) for output in outputs]

    def call(self, common_type: str, *values: Any) -> Any:
        """Call an operator of the framework from a routine."""
        return self.functions[common_type](*values)

    def scoped(
        self, name: str, function: Callable[..., Any], inner: Mapping[str, Callable[..., Any]]
    ) -> Callable[..., Any]:
        """Return a module of the framework that runs `function`; capability ``scopes``.

        Args:
            name: Its name within the module around it.
            function: What it computes.
            inner: Name -> the modules inside it, which `function` calls.
        """
        return function

    def build_recomputed(self, model: Model, values: Mapping[str, Value]) -> Program:
        """Build, as by `build`, a program that backward runs again; needs ``recomputed_edits``."""
        raise NotImplementedError(f"{type(self).__name__} has no build_recomputed()")

    def transformed(self, program: Program) -> Mapping[str, Transformed]:
        """Return a program in transformations of the framework, by name.

        The names are ``branch``, ``loop``, ``map`` and ``recomputed``: the program in a branch that
        is taken, in the body of a loop, mapped over copies of its inputs, and run again by its
        backward program.
        """
        return {}

    def traces(self, program: Program) -> int | None:
        """Return how often the framework has traced or compiled a program; None if it never does.

        Count only the program without tools, if the two can be told apart.
        """
        return None

    def mixed(self) -> Callable[[], Sequence[Value]] | None:
        """Return a program on integers and random keys, with an operator of several outputs.

        Leave out what the framework lacks. The program returns the same numbers at each call, so
        random ones need a fixed seed. It has gradients if the driver has them.
        """
        return None

    def of_another_type(self, value: Any) -> Any:
        """Return a value converted to another dtype; None if there is no other."""
        return None

    def end_step(self, program: Program) -> None:
        """End a training step as programs of this framework do; capability ``steps``."""
        raise NotImplementedError(f"{type(self).__name__} has no end_step()")

    def found(self) -> Mapping[str, object]:
        """Return the objects that a driver may change and must restore, by name.

        They are compared by identity. The default is all public attributes of the framework's
        modules.
        """
        return {
            f"{module}.{name}": value
            for module in self.info().modules
            if module in sys.modules
            for name, value in vars(sys.modules[module]).items()
            if not name.startswith("_")
        }

    def versions(self) -> Mapping[str, str]:
        """Return the version of the framework, and whatever else distinguishes test runs.

        The default is ``__version__`` of the framework's modules.
        """
        found = {
            name: getattr(sys.modules.get(name), "__version__", None)
            for name in self.info().modules
        }
        return {name: str(version) for name, version in found.items() if version is not None}

    # What the suite does with it.

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Register `plugin` as a driver inside `with`, unless it is installed."""
        if self.plugin is None or any(d.info.name == self.driver for d in discovery.drivers()):
            yield
            return
        discovery.register(self.plugin, self.driver, self._by_hand)
        try:
            yield
        finally:
            discovery.unregister(self.driver)

    def installed(self) -> discovery.Driver:
        """Return the driver, inside `registered`."""
        return next(d for d in discovery.drivers() if d.info.name == self.driver)

    @property
    def is_installed(self) -> bool:
        """Return True if an entry point names the driver, inside `registered`."""
        return self.installed().distribution != self._by_hand

    @property
    def _by_hand(self) -> str:
        return f"{type(self).__name__}.plugin"

    def info(self) -> DriverInfo:
        """Return the driver's description of itself, inside `registered`."""
        return self.installed().info
