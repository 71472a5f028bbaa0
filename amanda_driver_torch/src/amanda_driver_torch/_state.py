"""What the driver keeps for each thread: who watches it, where it is, and whether to look away.

Owns the thread-local state that interceptors, patches and hooks share; it decides nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from amanda_driver_torch import _build

if TYPE_CHECKING:
    from amanda_driver_torch._attachment import TorchAttachment
    from amanda_driver_torch._scopes import Activation

__all__ = ["STATE", "opaquely", "quietly"]


class _State(threading.local):
    def __init__(self) -> None:
        #: The attachment whose session instruments this thread.
        self.attachment: TorchAttachment | None = None
        #: Module activations, outermost first.
        self.activations: list[Activation] = []
        #: More than 0: what runs is none of the user's operators (printing, tracing, ...).
        self.quiet = 0
        #: More than 0: inside an operator written in Python, or in the backward engine. A module
        #: called there lifts it: then the operator was only a container.
        self.opaque = 0
        #: Function modes of the user's while the driver does its own work, outermost last.
        self.aside: list[Any] = []
        #: The mode of the function-mode interceptor, while it intercepts this thread.
        self.mode: object = None
        #: Python functions of torch's that are being run for the operators inside them.
        self.transparent: list[Any] = []
        #: How many backward passes this thread is inside.
        self.backward = 0
        #: Whether a checkpointed function is being run again.
        self.recomputing = False


# The same fields in memory that the native interceptor reads at each operator.
for _name, _field in _build.thread_fields().items():
    setattr(_State, _name, _field)

STATE = _State()


@contextmanager
def quietly() -> Iterator[None]:
    """Extent in which no operator of this thread is seen, whatever is called."""
    STATE.quiet += 1
    try:
        yield
    finally:
        STATE.quiet -= 1


@contextmanager
def opaquely() -> Iterator[None]:
    """Extent in which operators are seen only inside modules that are called."""
    STATE.opaque += 1
    try:
        yield
    finally:
        STATE.opaque -= 1
