"""The contract between interceptors and what they hand the calls of operators to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from amanda_core import Blind
from amanda_core.scopes import Activation, Scope, Scopes
from amanda_driver_torch._autograd.records import OpRecord
from amanda_driver_torch._operators.operator import Operator
from amanda_driver_torch._thread.state import Watcher

__all__ = ["Handler", "Interceptor"]


class Handler(Watcher, Protocol):
    """What the native interceptor knows of the attachment, beyond what all entry points do.

    Attributes:
        scopes: The modules that have been called.
    """

    scopes: Scopes

    def execute_known(
        self,
        record: OpRecord,
        operator: Operator,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one call of an operator whose record is known."""

    def resolve(self, op_type: str, scope: Scope | None, frames: Any, *call: Any) -> Any:
        """Return the record of an op that is not known yet; None to look away."""

    def trace_module(
        self, module: nn.Module, parent: Activation | None
    ) -> tuple[Scope, list[tuple[nn.Module, str]]]:
        """Return the scope of a module, and what it depends on."""

    def module_failed(self, error: BaseException) -> None:
        """Take notice of an exception that is leaving a module's call."""


class Interceptor(Protocol):
    """Hands each call of an operator in its thread to the attachment.

    A call that the attachment makes of the original is not handed over again.

    Attributes:
        name: How `AMANDA_TORCH_INTERCEPTOR` names it.
        watch: The extension's side of it, or None.
        hides_type_errors: Whether torch turns a TypeError that leaves a binary operator's
            interception into NotImplemented.
    """

    name: str
    watch: Any
    hides_type_errors: bool

    def start(self) -> None:
        """Begin to intercept in this thread."""

    def stop(self) -> None:
        """Cease, and leave nothing behind."""

    def inside(self) -> AbstractContextManager[object]:
        """Extent that is intercepted although an operator around it is running."""

    def activation(self, scope: Scope) -> Activation:
        """A call of a module, as this interceptor counts what is passed in it."""

    def locate(self, op_type: str, args: Any, kwargs: dict[str, Any], /) -> OpRecord | None:
        """The record of the op that is being called; None to look away."""

    def forget(self) -> None:
        """Keep no record: the sites have forgotten them."""

    def coverage(self) -> Sequence[Blind]:
        """Return what this interceptor cannot see, and why."""
