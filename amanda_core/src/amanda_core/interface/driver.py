"""The data types of the backend interface: descriptions, the attachment, facts about an op.

`hookspecs` owns the hooks of the interface. No backend is named here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol, runtime_checkable

from amanda_core.interface.facts import Facts

__all__ = [
    "DRIVER_API",
    "POINTS",
    "Attachment",
    "CoverageGap",
    "DescribingAttachment",
    "DriverInfo",
    "DriverStatus",
    "Finding",
    "IPoint",
    "NotifiedAttachment",
    "RecordedAction",
    "Site",
    "ThreadedAttachment",
    "WatchedContext",
    "WatchedSession",
    "ZonedAttachment",
]

#: Changes only if a driver written for an earlier number would break.
DRIVER_API = 3


class IPoint(Enum):
    """Instrumentation point: before or after an op, forward or backward (paper, section 4.2)."""

    BEFORE_FORWARD = "before_forward_op"
    AFTER_FORWARD = "after_forward_op"
    BEFORE_BACKWARD = "before_backward_op"
    AFTER_BACKWARD = "after_backward_op"

    # Members are singletons; hashing by identity spares Enum's Python-level hash on every lookup.
    __hash__ = object.__hash__

    @classmethod
    def of(cls, backward: bool, require_outputs: bool) -> IPoint:
        """Return the point that the two flags of `Tool.add_inst_for_op` select."""
        if backward:
            return cls.AFTER_BACKWARD if require_outputs else cls.BEFORE_BACKWARD
        return cls.AFTER_FORWARD if require_outputs else cls.BEFORE_FORWARD

    @property
    def is_backward(self) -> bool:
        """Return True if the point belongs to the backward program."""
        return self in POINTS[2:]

    @property
    def rank(self) -> int:
        """Position in the order of points within one execution, from 0."""
        return POINTS.index(self)


#: All points; iterating over the class itself takes much longer. So does reading its members.
POINTS = BEFORE_FORWARD, AFTER_FORWARD, BEFORE_BACKWARD, AFTER_BACKWARD = tuple(IPoint)


@dataclass(frozen=True, slots=True)
class DriverInfo:
    """A driver's description of itself, made without importing its framework.

    Attributes:
        name: The framework's part of the namespace.
        modules: Top-level modules of the framework. It is in use if ``sys.modules`` has one of
            them. If one is imported inside `apply`, the driver attaches then.
        namespaces: Namespaces of its contexts, with ``*`` for parts that are known only at run
            time.
        capabilities: Names such as ``gradients`` or ``replace_backward``; see the drivers' guide.
            If they differ by mode: last part of a namespace -> its capabilities.
        vocabulary: The backend's op types -> common operator types of `vocabulary`.
        api: The `DRIVER_API` that the driver was written for, as a literal number: the installed
            core may have another one.
        wrappers: Modules and packages of the framework whose functions only call a program's own
            code, such as the one that calls modules. `amanda run` leaves their frames out of
            tracebacks.
        environment: Environment variables without which the framework's results would be wrong.
            `amanda run` sets them before the program starts, where the preflight has an error.
    """

    name: str
    modules: tuple[str, ...]
    namespaces: tuple[str, ...]
    capabilities: frozenset[str] | Mapping[str, frozenset[str]] = frozenset()
    vocabulary: Mapping[str, str] = field(default_factory=dict)
    api: int = field(kw_only=True)
    wrappers: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

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
        zone: ``model``, or which part of a program that is not the model: ``optimizer``, ``init``,
            ``data``, ``metrics``, or a name that the program gives it with `amanda.zone`.
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
class ThreadedAttachment(Attachment, Protocol):
    """An attachment that another thread can take over, of a driver with ``threads``.

    Such a driver calls `amanda_core.driver_kit.join` at operators of threads without an attachment.
    Its `detach` may be called by another thread than the one that is attached.
    """

    def enter_thread(self) -> None:
        """Intercept in the calling thread. The one that was attached has ended."""

    def ask(self) -> None:
        """Let threads without an attachment call `join` again, which may answer otherwise now."""


@runtime_checkable
class ZonedAttachment(Attachment, Protocol):
    """An attachment whose operators get another identity inside `amanda.zone`.

    Drivers without it find the zone of a new operator with `amanda_core.driver_kit.zone_of`.
    """

    def enter_zone(self, zone: str) -> Callable[[], None]:
        """Let the operators of this thread belong to a zone; return a function that ends this.

        It is called when the program enters `amanda.zone`, and for the zones that it has entered
        before the driver was attached.
        """


@runtime_checkable
class DescribingAttachment(Attachment, Protocol):
    """An attachment that describes tensors to tools: dtype, shape, values and the like."""

    @property
    def facts(self) -> Facts | None:
        """The facts about tensors; None if the driver describes none.

        The engine reads it once for each session, after attaching. All sessions may share one
        object, since `Facts` must refer to no session and no tensor, and be callable in any thread.
        """


class WatchedSession(Protocol):
    """What the hooks say of a session. Drivers get a `amanda_core.driver_kit.Session`."""

    @property
    def enabled(self) -> bool:
        """True if operators of the calling thread must be instrumented now."""

    @property
    def wants_backward(self) -> bool:
        """True if an applied tool analyses backward ops."""


class WatchedContext(Protocol):
    """What the hooks, and what is below the engine, know of an `amanda.OpContext`.

    `execution` holds the facts of the current execution, which drivers have set.
    """

    execution: dict[str, Any]

    @property
    def namespace(self) -> str:
        """``framework/version/mode``."""

    @property
    def op_type(self) -> str:
        """The backend's own name of the operator."""

    @property
    def zone(self) -> str:
        """``model``, or which other part of a program."""

    @property
    def site(self) -> Site:
        """The constant facts of the op."""

    @property
    def forward(self) -> Any:
        """The context of the forward op of a backward context, or None."""

    @property
    def facts(self) -> Facts | None:
        """The driver's facts about tensors; None if it describes none."""

    @property
    def weights(self) -> Any:
        """The parameters that this execution reads: `amanda_core.weights.reads.Reads`."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return what a tool or plugin wrote under a key."""

    def get_inputs(self) -> Any:
        """Return the inputs by position."""

    def insert_after_op(
        self, func: Callable[..., Any], outputs: Sequence[int] | None = None, **kwargs: Any
    ) -> None:
        """Call `func` after each execution; `observe=True` promises not to change anything."""


class RecordedAction(Protocol):
    """What the hooks say of a request of an analysis routine, an `amanda_core.Action`."""

    @property
    def routine_name(self) -> str:
        """Qualified name of the routine, for messages."""
