"""Callables of `torch.compile` as a backend of the conformance kit."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.utils.checkpoint import checkpoint

from amanda_core.testing import Model, Program, Transformed, Value

from .torch_backend import NativeBackend

__all__ = ["CompiledBackend"]


class CompiledBackend(NativeBackend):
    """Programs compiled as one graph each, by AOTAutograd without a code generator."""

    mode = "compiled"
    compiler: ClassVar[str] = "aot_eager"

    @property
    def title(self) -> str:
        return f"pytorch compiled, {self.compiler}"

    def compiled(
        self, function: Callable[..., Any], traces: list[int] | None = None
    ) -> Callable[..., Any]:
        """Compile a function, and note each compilation of the graph without tools."""
        found: Callable[..., Any] = torch.compile(function, backend=self.compiler, fullgraph=True)
        return found

    def importable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let Dynamo import the module that a function of the kit says to be of."""
        module = types.ModuleType(function.__module__)
        vars(module).update(function.__globals__)
        sys.modules[function.__module__] = module
        return function

    def build(self, model: Model, values: Mapping[str, Value]) -> Program:
        program = super().build(model, values)
        function = self.importable(program.function)
        return Program(model, self.compiled(function), program.parameters, function)

    def build_recomputed(self, model: Model, values: Mapping[str, Value]) -> Program:
        program = super().build(model, values)
        return self._recomputed(program)

    def _recomputed(self, program: Program) -> Program:
        function = self.importable(program.function)

        def recomputed(*given: Any) -> Any:
            return checkpoint(function, *given, use_reentrant=False)

        return Program(program.model, self.compiled(recomputed), program.parameters)

    def transformed(self, program: Program) -> Mapping[str, Transformed]:
        plain = Program(program.model, program.extra, program.parameters)
        return {"recomputed": Transformed(self._recomputed(plain), calls=2, backward=True)}

    def mixed(self) -> Callable[[], Sequence[Value]]:
        found: Callable[[], Sequence[Value]] = torch.compile(super().mixed(), backend=self.compiler)
        return found

    @contextmanager
    def registered(self) -> Iterator[None]:
        torch._dynamo.reset()
        with super().registered():
            yield
