"""Which interceptor is used, and why: the seam between operators' entry and the rest.

Owns the contract of interceptors and the choice among those that this installation has.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from amanda_core import Blind
from amanda_core.errors import UnsupportedError
from amanda_driver_torch import _build
from amanda_driver_torch._function_mode import FunctionModeInterceptor

if TYPE_CHECKING:
    from amanda_driver_torch._attachment import TorchAttachment
    from amanda_driver_torch._records import OpRecord
    from amanda_driver_torch._scopes import Activation, Scope
    from amanda_driver_torch._sites import Sites

__all__ = ["VARIABLE", "Choice", "Interceptor", "choice", "choose"]

#: Environment variable that names an interceptor.
VARIABLE = "AMANDA_TORCH_INTERCEPTOR"

NAMES = ("native", "function_mode")


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
        """What this interceptor cannot see, and why."""


class Choice(NamedTuple):
    """Which interceptor new sessions use.

    Attributes:
        name: ``native`` or ``function_mode``.
        why: A sentence that says why this one.
    """

    name: str
    why: str


def choice() -> Choice:
    """Which interceptor a session would use now, and why.

    Raises:
        UnsupportedError: The one that `AMANDA_TORCH_INTERCEPTOR` asks for is not available.
    """
    asked = os.environ.get(VARIABLE)
    if asked and asked not in NAMES:
        raise UnsupportedError(
            f"{VARIABLE}={asked} names no interceptor",
            where="amanda-driver-torch",
            fix=f"Use one of: {', '.join(NAMES)}",
        )
    if asked == "native" and _build.native is None:
        raise UnsupportedError(
            f"{VARIABLE}=native, but {_build.missing}",
            where="amanda-driver-torch",
            fix="Install a C++ compiler and then amanda-driver-torch anew, or unset the variable",
        )
    if asked:
        return Choice(asked, f"{VARIABLE} asks for it")
    if _build.native is None:
        return Choice("function_mode", f"There is no native one: {_build.missing}")
    return Choice("native", f"The extension is there; it reads {_build.native.FRAMES}")


def choose(attachment: TorchAttachment, sites: Sites[OpRecord]) -> Interceptor:
    """The interceptor asked for by `AMANDA_TORCH_INTERCEPTOR`, or the best one there is.

    Raises:
        UnsupportedError: The one asked for is not available.
    """
    if choice().name == "native":
        from amanda_driver_torch._native_interceptor import NativeInterceptor

        return NativeInterceptor(attachment, sites)
    return FunctionModeInterceptor(attachment, sites)
