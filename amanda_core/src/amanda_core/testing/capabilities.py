"""The capabilities that the suite knows, and the marks by which its tests ask for them.

Owns the words of `DriverInfo.capabilities` and the rule that a test of what is not declared is
skipped with a reason. What a capability means in detail is what its tests check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from amanda_core.driver import DriverInfo
from amanda_core.testing.backend import Backend

__all__ = [
    "CAPABILITIES",
    "CORE",
    "OPERATORS",
    "OPTIONAL",
    "Needs",
    "needs",
    "needs_of",
    "reason_to_skip",
]

F = TypeVar("F", bound=Callable[..., object])

#: Word -> what a driver that declares it does. ``eager`` and ``graph`` name modes: no tests.
CAPABILITIES: Mapping[str, str] = {
    "eager": "operators are executed one by one",
    "graph": "operators are nodes of a graph that is built before it runs",
    "gradients": "backward ops have contexts, and raw actions on their gradients take effect",
    "aligned_gradients": "actions on the gradients of a forward op's own inputs and outputs",
    "late_gradients": "those actions may also be asked for once the forward op has run",
    "replace": "replace_op runs a routine instead of an op",
    "replace_backward": "replace_backward_op runs a routine instead of an op's backward program",
    "autodiff": "routines inserted under autodiff_enabled are differentiated",
    "staged": "routines marked as staged may be embedded into a graph",
    "observers": "a routine that only looks is added as a reader, and nothing else changes for it",
    "steps": "what ends a training step in the framework is told to tools",
    "scopes": "an op knows the path of the module of the framework that it runs in",
    "scope_events": "entering and leaving a module is told to tools",
    "recomputed_edits": "edits hold where activation checkpointing runs an op again",
    "recomputed_flag": "an op that runs again is the same op, and its context says so",
    "ordered": "routines run in program order, at the time of their op",
    "facts": "tools are told what a tensor is: its dtype, shape, device, layout, memory and values",
}

#: What stands in reports for the tests that every driver has to pass.
CORE = "core"
#: And for those of operators that a backend may lack.
OPERATORS = "more operators"
#: And for those of what a backend may give, such as transformed programs.
OPTIONAL = "optional programs"


@dataclass(frozen=True)
class Needs:
    """What a test asks for.

    Attributes:
        capabilities: All have to be declared; the last one is what the test is about.
        words: Operators that the backend must offer beside those that all have.
        optional: Whether it is about what a backend may give; the test skips by itself.
    """

    capabilities: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    optional: bool = False

    @property
    def group(self) -> str:
        """What the result counts for."""
        if self.optional:
            return OPTIONAL
        if self.capabilities:
            return self.capabilities[-1]
        return OPERATORS if self.words else CORE


def needs(
    *capabilities: str, words: tuple[str, ...] = (), optional: bool = False
) -> Callable[[F], F]:
    """Mark a test of the suite."""
    unknown = set(capabilities) - set(CAPABILITIES)
    if unknown:
        raise ValueError(f"No such capabilities: {sorted(unknown)}")

    def mark(function: F) -> F:
        # An attribute and not a pytest mark: those must be registered before the import.
        function.__amanda_needs__ = Needs(capabilities, words, optional)  # type: ignore[attr-defined]
        return function

    return mark


def needs_of(function: object) -> Needs:
    """Return what a test asks for; nothing where it has no mark."""
    found = getattr(function, "__amanda_needs__", None)
    return found if isinstance(found, Needs) else Needs()


def reason_to_skip(needed: Needs, backend: Backend, info: DriverInfo) -> str:
    """Why a test cannot be asked of a backend, or an empty string."""
    for capability in needed.capabilities:
        if capability not in info.capabilities_in(""):
            return f"the driver {info.name!r} does not declare {capability!r}"
        if capability not in info.capabilities_in(backend.mode):
            return f"the driver {info.name!r} does not declare {capability!r} for {backend.mode!r}"
        if capability in backend.without:
            return f"{backend.title} has no {capability!r}: {backend.without[capability]}"
    missing = [word for word in needed.words if word not in backend.functions]
    if missing:
        return f"{backend.title} offers the suite no {', '.join(missing)}"
    return ""
