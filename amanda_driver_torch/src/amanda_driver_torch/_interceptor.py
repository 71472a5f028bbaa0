"""Which interceptor is used, and why: the seam between operators' entry and the rest.

Owns the contract of interceptors and the choice among those that this installation has.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from amanda_core import Blind
from amanda_core.errors import UnsupportedError
from amanda_driver_torch._function_mode import FunctionModeInterceptor

if TYPE_CHECKING:
    from amanda_driver_torch._attachment import TorchAttachment

__all__ = ["VARIABLE", "Interceptor", "choose"]

#: Environment variable that names an interceptor.
VARIABLE = "AMANDA_TORCH_INTERCEPTOR"


class Interceptor(Protocol):
    """Hands each call of an operator in its thread to `TorchAttachment.execute`.

    A call that the attachment makes of the original is not handed over again.
    """

    name: str

    def start(self) -> None:
        """Begin to intercept in this thread."""

    def stop(self) -> None:
        """Cease, and leave nothing behind."""

    def inside(self) -> AbstractContextManager[object]:
        """Extent that is intercepted although an operator around it is running."""

    def coverage(self) -> Sequence[Blind]:
        """What this interceptor cannot see, and why."""


_INTERCEPTORS = {FunctionModeInterceptor.name: FunctionModeInterceptor}


def choose(attachment: TorchAttachment) -> Interceptor:
    """The interceptor asked for by `AMANDA_TORCH_INTERCEPTOR`, or the best one there is.

    Raises:
        UnsupportedError: The one asked for is not available.
    """
    name = os.environ.get(VARIABLE) or FunctionModeInterceptor.name
    if name not in _INTERCEPTORS:
        raise UnsupportedError(
            f"{VARIABLE}={name} names no interceptor of this installation",
            where="amanda-driver-torch",
            fix=f"Use one of: {', '.join(_INTERCEPTORS)}",
        )
    return _INTERCEPTORS[name](attachment)
