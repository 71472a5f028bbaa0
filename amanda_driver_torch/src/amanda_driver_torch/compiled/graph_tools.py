"""The parts of a session that analyse traced graphs, and the requests of its tools to them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch

from amanda_core.driver_kit import Known, OpContext, Session, Sites
from amanda_core.interface import Site
from amanda_driver_torch.compiled.choice import misses_backward
from amanda_driver_torch.compiled.host import Host
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.inductor import makes_kernels

__all__ = ["GraphTools"]


@dataclasses.dataclass
class GraphTools:
    """The parts of a session that the analysis of graphs needs.

    Attributes:
        session: The session.
        host: Calls routines on the host.
        sites: Names operators.
        constant: Returns a value that is the same in every execution of its op, else None.
        gaps: For the coverage: what is not as without tools, and why.
        woven: Contexts of operators of graphs that run -> True.
        exports: Whether the graph becomes a program that runs without Amanda.
        kernels: Whether the compiler's kernels are shown as operators.
        nodes: Name of a node of the last graph -> contexts of its operators.
    """

    session: Session
    host: Host
    sites: Sites[Site]
    constant: Callable[[Any], Any]
    gaps: dict[str, str]
    woven: Known[bool]
    exports: bool = False
    kernels: bool = False
    nodes: dict[str, list[OpContext]] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def exporting(self) -> Iterator[None]:
        """Weave for programs that run without Amanda: what needs the host is an error."""
        self.exports = True
        try:
            yield
        finally:
            self.exports = False

    def why_not(self, function: Any) -> str:
        """Return why nothing can be woven for the tools; an empty string if it can.

        Args:
            function: The compiled function.
        """
        session = self.session
        if not session.caching:
            return "the cache of analysis is disabled"
        if _updates(function):
            return ""  # It records no gradients, and its modules are not those of the model.
        # A graph that is exported has operators for the values of modules.
        if (session.watches_scopes or session.watches_values) and not self.exports:
            return "a tool follows the calls of modules, which a compiled graph does not have"
        return ""

    def choose(self, backend: Any, inputs: Sequence[Any]) -> None:
        """Choose if the operators of a graph are shown as kernels as well."""
        self.kernels = self.shows_kernels() and makes_kernels(backend, inputs)

    def shows_kernels(self) -> bool:
        """Return True if a tool is shown the kernels of compiled graphs."""
        is_seen = any(map(_sees_kernels, self.session.tools))
        return is_seen and not self.exports

    def shares(self, backend: Any) -> bool:
        """Return True if several places may run the same code of a backend."""
        # Kernels are operators of one place.
        return not (self.exports or (self.shows_kernels() and makes_kernels(backend, ())))

    def accumulates(self, inputs: Sequence[Any]) -> bool:
        """Return True if a tool analyses the accumulation of gradients of a graph's inputs."""
        if not self.session.wants_backward or misses_backward() or self.exports:
            return False
        if self.kernels and all(map(_sees_kernels, self.session.tools)):
            return False  # It takes far less time than hooks around it.
        return torch.is_grad_enabled() and any(map(_requires_grad, inputs))


def _sees_kernels(tool: Any) -> bool:
    return bool(tool.sees_compiled_calls and not tool.uncompiled)


def _updates(function: Any) -> bool:
    """Return True for a step of an optimizer, and for everything that one calls."""
    if STATE.activations and STATE.activations[-1].scope.zone == "optimizer":
        return True
    owner = getattr(function, "__self__", None) if type(function) is MethodType else None
    return isinstance(owner, torch.optim.Optimizer) and function.__name__ == "step"


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
