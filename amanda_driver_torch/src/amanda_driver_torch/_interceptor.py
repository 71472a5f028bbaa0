"""The seam between operators' entry and the rest.

Owns the contract of interceptors, and makes the one that is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from amanda_core import Blind
from amanda_core.interceptors import NATIVE
from amanda_driver_torch._function_mode import FunctionModeInterceptor
from amanda_driver_torch._interceptor_choice import INTERCEPTORS

if TYPE_CHECKING:
    from amanda_driver_torch._attachment import TorchAttachment
    from amanda_driver_torch._records import OpRecord
    from amanda_driver_torch._scopes import Activation, Scope
    from amanda_driver_torch._sites import Sites

__all__ = ["Interceptor", "choose"]


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


def choose(attachment: TorchAttachment, sites: Sites[OpRecord]) -> Interceptor:
    """Return the interceptor asked for by `AMANDA_TORCH_INTERCEPTOR`, or the best one there is.

    Raises:
        UnsupportedError: The one asked for is not available.
    """
    if INTERCEPTORS.choice().name == NATIVE:
        from amanda_driver_torch._native_interceptor import NativeInterceptor

        return NativeInterceptor(attachment, sites)
    return FunctionModeInterceptor(attachment, sites)
