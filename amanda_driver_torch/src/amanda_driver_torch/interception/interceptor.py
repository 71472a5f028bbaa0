"""The protocols between interceptors and the attachment that executes operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol, TypeVar

from torch import nn

from amanda_core.driver_kit import Activation, Scope, Scopes
from amanda_core.interface import CoverageGap
from amanda_driver_torch.gradients.records import OpRecord
from amanda_driver_torch.operators.operator import Operator
from amanda_driver_torch.threads.state import Watcher

__all__ = ["Handler", "Interceptor"]

R = TypeVar("R")


class Handler(Watcher, Protocol):
    """The interface of the attachment that only the native interceptor needs.

    Attributes:
        scopes: The modules that have been called.
    """

    scopes: Scopes

    def execute_known(self, record: OpRecord, operator: Operator, *call: Any) -> Any:
        """Execute one call of an operator whose record is known."""

    def resolve(self, op_type: str, scope: Scope | None, frames: Any, *call: Any) -> Any:
        """Return the record of an op that is not known yet; None to ignore the op."""

    def trace_module(
        self, module: nn.Module, parent: Activation | None
    ) -> tuple[Scope, list[tuple[nn.Module, str]]] | None:
        """Return the scope of a module, and what it depends on; None if it wraps another."""

    def module_failed(self, error: BaseException) -> None:
        """Handle an exception that leaves a module's call."""


class Interceptor(Protocol):
    """Passes each call of an operator in its thread to the attachment.

    The attachment's own calls of original operators are not passed again.

    Attributes:
        name: Its name in `AMANDA_TORCH_INTERCEPTOR`.
        watch: The native extension's part of it, or None.
        hides_type_errors: Whether torch turns a TypeError raised in the interception of a binary
            operator into NotImplemented.
    """

    name: str
    watch: Any
    hides_type_errors: bool

    def start(self) -> None:
        """Start intercepting in this thread."""

    def enter_thread(self) -> None:
        """Intercept in this thread, after another one, which has ended."""

    def ask(self) -> None:
        """Let threads that are not intercepted ask again whether they are to be."""

    def stop(self, elsewhere: bool = False, keep: bool = False) -> None:
        """Stop intercepting and restore everything.

        Args:
            elsewhere: Whether it intercepts in another thread than the calling one.
            keep: Whether to keep what it knows of operators for `resume`.
        """

    def call_inside(self, function: Callable[..., R], *args: Any) -> R:
        """Call `function` and intercept its operators, although an operator is running."""

    def activation(
        self, scope: Scope, around: Activation | None = None, frame: FrameType | None = None
    ) -> Activation:
        """Return an activation for a call of a module, or for a zone in `around`.

        Args:
            scope: The scope of the module, or of the zone.
            around: In which the zone is entered.
            frame: The frame that enters the zone and leaves it.
        """

    def locate(self, op_type: str, args: Any, kwargs: dict[str, Any], /) -> OpRecord | None:
        """Return the record of the op that is being called; None to ignore the op."""

    def forget(self) -> None:
        """Drop all cached records, since the sites have dropped them."""

    def coverage(self) -> Sequence[CoverageGap]:
        """Return what this interceptor cannot see, and why."""
