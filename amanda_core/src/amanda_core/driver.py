"""What a driver and the core tell each other: descriptions, the attachment, facts about an op.

Owns the data types of the backend interface; `hookspecs` owns its hooks. Names no backend.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from amanda_core.facts import Facts

__all__ = [
    "DRIVER_API",
    "Attachment",
    "CoverageGap",
    "DescribingAttachment",
    "DriverInfo",
    "DriverStatus",
    "Finding",
    "NotifiedAttachment",
    "Site",
]

#: Changes only when a driver written against an earlier number would break.
DRIVER_API = 2


@dataclass(frozen=True, slots=True)
class DriverInfo:
    """What a driver says of itself without importing its framework.

    Attributes:
        name: The framework's part of the namespace.
        modules: Top-level modules whose presence in ``sys.modules`` means that the framework is
            in use; importing one inside `apply` attaches the driver then.
        namespaces: Namespaces that its contexts carry, ``*`` for parts known only at run time.
        capabilities: Words such as ``gradients`` or ``replace_backward``; see the drivers' guide.
            Where they differ by mode: last part of a namespace -> its words.
        vocabulary: The backend's op types in the common words of `amanda_core.vocabulary`.
        api: The `DRIVER_API` that the driver was written for, as a number: what is installed may
            be another.
    """

    name: str
    modules: tuple[str, ...]
    namespaces: tuple[str, ...]
    capabilities: frozenset[str] | Mapping[str, frozenset[str]] = frozenset()
    vocabulary: Mapping[str, str] = field(default_factory=dict)
    api: int = field(kw_only=True)

    def capabilities_in(self, mode: str) -> frozenset[str]:
        """Return the capabilities in one mode, or those of all modes for an empty string."""
        declared = self.capabilities
        if isinstance(declared, frozenset):
            return declared
        if not mode:
            return frozenset().union(*declared.values())
        return declared.get(mode, frozenset())


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """What a driver would do here at the next `apply`.

    Attributes:
        version: Version of the framework that is installed; None where there is none.
        interceptor: Name of the implementation by which operators are seen; empty where none is.
        why: A sentence that says why this one.
    """

    version: str | None
    interceptor: str
    why: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in this environment that would make results wrong, and what to do about it."""

    severity: Literal["info", "warning", "error"]
    message: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class CoverageGap:
    """An operator or execution path that a driver does not instrument.

    Attributes:
        what: The operator or the path.
        why: Why it is not instrumented.
    """

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Site:
    """The unchanging facts of one op, found by a driver.

    Attributes:
        key: Identity of the op, made of strings, numbers, None and tuples of them, so that it is
            the same in another process that runs the same program; the op id is derived from it.
        op_type: The backend's own name of the operator or backward operator.
        namespace: ``framework/version/mode``.
        name: Readable name, such as ``encoder.layer.3.attention.self.query/linear``.
        module_path: Path of the module or scope, or an empty string.
        source: ``file:line`` of the call, or None.
        zone: ``model``, or which part of a program that is not the model: ``optimizer``, ``init``.
    """

    key: Hashable
    op_type: str
    namespace: str
    name: str
    module_path: str = ""
    source: str | None = None
    zone: str = "model"


@runtime_checkable
class Attachment(Protocol):
    """A driver's hold on a framework for one session."""

    def detach(self) -> None:
        """Drain asynchronous work and restore everything that was found."""

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what this driver cannot see here, and why."""


@runtime_checkable
class NotifiedAttachment(Attachment, Protocol):
    """An attachment that is told of changes, such as one that keeps compiled programs by a key."""

    def changed(self) -> None:
        """Note that `Session.enabled`, `caching` or `epoch` has changed, and read them again.

        Called after each change by a switch, by tools that come, go or are invalidated, and by a
        step; in the thread that makes the change, which is nearly always the session's. Routines
        of tools do not count: inside one, `Session.enabled` is false without a call. What it
        raises is kept for `Session.raise_pending`.
        """


@runtime_checkable
class DescribingAttachment(Attachment, Protocol):
    """An attachment that answers what tools ask of tensors: dtype, shape, values and the like."""

    @property
    def facts(self) -> Facts | None:
        """The answers; the same object for all sessions will do."""
