"""Capabilities of drivers, and the marks with which tests of the suite require them.

Defines the names in `DriverInfo.capabilities`, and skips tests of undeclared capabilities with a
reason. The tests of a capability define its meaning in detail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from amanda_core.interface.driver import DriverInfo
from amanda_core.testing.kit.backend import Backend

__all__ = [
    "CAPABILITIES",
    "CORE",
    "INTERRUPTIONS",
    "OPERATORS",
    "OPTIONAL",
    "Needs",
    "needs",
    "needs_of",
    "reason_to_skip",
]

F = TypeVar("F", bound=Callable[..., object])

#: Capability -> meaning. ``eager`` and ``graph`` name modes and have no tests. What is
#: exported is run by the framework, so each driver tests it.
CAPABILITIES: Mapping[str, str] = {
    "eager": "operators are executed one by one",
    "graph": "operators are nodes of a graph that is built before it runs",
    "gradients": "backward ops have contexts, and raw actions on their gradients take effect",
    "aligned_gradients": "actions on gradients of a forward op's inputs and outputs take effect",
    "late_gradients": "those actions may also be requested after the forward op has run",
    "replace": "replace_op runs a routine instead of an op",
    "replace_backward": "replace_backward_op runs a routine instead of an op's backward program",
    "autodiff": "routines inserted under autodiff_enabled are differentiated",
    "staged": "routines marked as staged may be embedded into a graph",
    "export": "amanda.exported returns a program with the edits, which needs no Amanda",
    "observers": "a routine that only looks is added as a reader and changes nothing else",
    "steps": "tools are notified when a training step of the framework ends",
    "scopes": "an op knows the path of the framework's module in which it runs",
    "scope_events": "tools are notified when a module is entered and left",
    "calls": "calls of outermost modules are counted and reported to tools with their arguments",
    "module_values": "a module's inputs and outputs are operators for the tools that ask for them",
    "recomputed_edits": "edits also take effect when activation checkpointing runs an op again",
    "recomputed_flag": "an op that runs again is the same op, and its context says so",
    "threads": "tools for all threads are applied to those that did not apply them",
    "ordered": "routines run in program order, at the time of their op",
    "facts": "tools can ask about tensors: dtype, shape, device, layout, memory and values",
}

#: The group in reports of the tests that every driver must pass.
CORE = "core"
#: The group of the tests of operators that a backend may lack.
OPERATORS = "more operators"
#: The group of the tests of what a backend may provide, such as transformed programs.
OPTIONAL = "optional programs"
#: The group of the tests that interrupt programs, which run each of them many times.
INTERRUPTIONS = "interruptions"


@dataclass(frozen=True)
class Needs:
    """The requirements of a test.

    Attributes:
        capabilities: Capabilities that must all be declared; the test is about the last one.
        common_types: Operators that the backend must provide besides the required ones.
        optional: Whether the test is about what a backend may provide. Such a test skips itself.
        interrupts: Whether it interrupts programs.
    """

    capabilities: tuple[str, ...] = ()
    common_types: tuple[str, ...] = ()
    optional: bool = False
    interrupts: bool = False

    @property
    def group(self) -> str:
        """The group in reports to which the result belongs."""
        if self.interrupts:
            return INTERRUPTIONS
        if self.optional:
            return OPTIONAL
        if self.capabilities:
            return self.capabilities[-1]
        return OPERATORS if self.common_types else CORE


def needs(
    *capabilities: str,
    common_types: tuple[str, ...] = (),
    optional: bool = False,
    interrupts: bool = False,
) -> Callable[[F], F]:
    """Mark a test of the suite with what it needs."""
    unknown = set(capabilities) - set(CAPABILITIES)
    if unknown:
        raise ValueError(f"No such capabilities: {sorted(unknown)}")

    def mark(function: F) -> F:
        # An attribute and not a pytest mark, which must be registered before the import.
        function.__amanda_needs__ = Needs(capabilities, common_types, optional, interrupts)  # type: ignore[attr-defined]
        return function

    return mark


def needs_of(function: object) -> Needs:
    """Return what a test needs; nothing if it has no mark."""
    found = getattr(function, "__amanda_needs__", None)
    return found if isinstance(found, Needs) else Needs()


def reason_to_skip(needed: Needs, backend: Backend, info: DriverInfo) -> str:
    """Return why a backend cannot run a test, or an empty string."""
    for capability in needed.capabilities:
        if capability not in info.capabilities_in(""):
            return f"the driver {info.name!r} does not declare {capability!r}"
        if capability not in info.capabilities_in(backend.mode):
            return f"the driver {info.name!r} does not declare {capability!r} for {backend.mode!r}"
        if capability in backend.without:
            return f"{backend.title} has no {capability!r}: {backend.without[capability]}"
    missing = [
        common_type for common_type in needed.common_types if common_type not in backend.functions
    ]
    if missing:
        return f"{backend.title} offers the suite no {', '.join(missing)}"
    return ""
