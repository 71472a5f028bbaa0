"""The data types of the backend interface: descriptions, the attachment, facts about an op.

`hookspecs` owns the hooks of the interface. No backend is named here.
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

#: Changes only if a driver written for an earlier number would break.
DRIVER_API = 2


@dataclass(frozen=True, slots=True)
class DriverInfo:
    """A driver's description of itself, made without importing its framework.

    Attributes:
        name: The framework's part of the namespace.
        modules: Top-level modules that the framework is in use if ``sys.modules`` has one of them.
            If one is imported inside `apply`, the driver attaches then.
        namespaces: Namespaces of its contexts, with ``*`` for parts that are known only at run
            time.
        capabilities: Names such as ``gradients`` or ``replace_backward``; see the drivers' guide.
            If they differ by mode: last part of a namespace -> its capabilities.
        vocabulary: The backend's op types -> common operator types of `amanda_core.vocabulary`.
        api: The `DRIVER_API` that the driver was written for, as a literal number: the installed
            core may have another one.
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
    """How a driver would intercept operators at the next `apply`.

    Attributes:
        version: Version of the installed framework; None if it is not installed.
        interceptor: Name of the implementation that would intercept operators, or an empty string.
        why: A sentence that says why this one is used.
        refused: The reason for which the driver refuses to attach, or an empty string.
    """

    version: str | None
    interceptor: str
    why: str
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of this environment that would make results wrong, and what to do about it."""

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


# Not frozen: it is made for each op, and a frozen one takes ten times as long to make.
@dataclass(slots=True, unsafe_hash=True)
class Site:
    """The unchanging facts of one op, found by a driver. Nothing changes it.

    Attributes:
        key: Identity of the op, made of strings, numbers, None and tuples of them. It is the same
            in another process that runs the same program. The op id is derived from it.
        op_type: The backend's own name of the operator or backward operator.
        namespace: ``framework/version/mode``.
        name: Readable name, such as ``encoder.layer.3.attention.self.query/linear``.
        module_path: Path of the module or scope, or an empty string.
        source: ``file:line`` of the call, or None.
        zone: ``model``, or which part of a program that is not the model: ``optimizer``, ``init``.
        same_as: Another mode of the framework, in which an op with this key has the same op id.
    """

    key: Hashable
    op_type: str
    namespace: str
    name: str
    module_path: str = ""
    source: str | None = None
    zone: str = "model"
    same_as: str = ""


@runtime_checkable
class Attachment(Protocol):
    """A driver's hold on a framework for one session."""

    def detach(self) -> None:
        """Wait for asynchronous work to end and restore the framework as it was found."""

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what this driver does not instrument here, and why."""


@runtime_checkable
class NotifiedAttachment(Attachment, Protocol):
    """An attachment that is notified of changes, for example to choose its compiled programs."""

    def changed(self) -> None:
        """React to a change of `Session.enabled`, `caching` or `epoch`.

        It is called after each change by a switch, by a step, and by tools that are applied,
        removed or invalidated. The calling thread is the one that makes the change, which is nearly
        always the session's. It is not called for routines of tools, although `Session.enabled` is
        false inside them. An exception is kept for `Session.raise_pending`.
        """


@runtime_checkable
class DescribingAttachment(Attachment, Protocol):
    """An attachment that describes tensors to tools: dtype, shape, values and the like."""

    @property
    def facts(self) -> Facts | None:
        """The facts about tensors; all sessions may share one object."""
