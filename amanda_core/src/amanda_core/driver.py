"""What a driver and the core tell each other: descriptions, the attachment, facts about an op.

Owns the data types of the backend interface; `hookspecs` owns its hooks. Names no backend.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

__all__ = ["DRIVER_API", "Attachment", "Blind", "DriverInfo", "Finding", "Site"]

#: Changes only when a driver written against an earlier number would break.
DRIVER_API = 1


@dataclass(frozen=True, slots=True)
class DriverInfo:
    """What a driver says of itself without importing its framework.

    Attributes:
        name: The framework's part of the namespace.
        modules: Top-level modules whose presence in ``sys.modules`` means that the framework is
            in use; importing one inside `apply` attaches the driver then.
        namespaces: Namespaces that its contexts carry, ``*`` for parts known only at run time.
        capabilities: Words such as ``gradients`` or ``replace_backward``; see the drivers' guide.
        vocabulary: The backend's op types in the common words of `amanda_core.vocabulary`.
        api: The `DRIVER_API` that the driver was written for.
    """

    name: str
    modules: tuple[str, ...]
    namespaces: tuple[str, ...]
    capabilities: frozenset[str] = frozenset()
    vocabulary: Mapping[str, str] = field(default_factory=dict)
    api: int = DRIVER_API


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in this environment that would make results wrong, and what to do about it."""

    severity: Literal["info", "warning", "error"]
    message: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Blind:
    """Something that a driver cannot see or does not touch, and why."""

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

    def isolate(self) -> AbstractContextManager[object]:
        """Extent in which the framework records no gradients and nothing is intercepted."""

    def coverage(self) -> Sequence[Blind]:
        """What this driver cannot see here, and why."""
