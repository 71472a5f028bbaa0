"""What the driver keeps for each thread: who watches it, where it is, and whether to look away.

Owns the thread-local state that interceptors, patches and hooks share; it decides nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from amanda_core import Session
from amanda_core.scopes import Activation
from amanda_driver_torch._operators.operator import Operator
from amanda_driver_torch._torch import extension

__all__ = ["STATE", "Watcher", "opaquely", "quietly"]


class Watcher(Protocol):
    """What entry points know of the attachment that instruments their thread.

    Attributes:
        session: Its session.
        watch: The extension's side of it, or None.
        edits: Number of values edited and operators replaced so far.
    """

    session: Session
    watch: Any

    @property
    def edits(self) -> int: ...

    def watching(self) -> bool:
        """Return True if an operator that this thread calls now is to be instrumented."""

    def execute(
        self, operator: Operator, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run one call of an operator."""

    def execute_python(
        self,
        raw: Any,
        name: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one call of an operator written in Python or as a script."""

    def call_module(
        self, module: Any, original: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run one call of a module."""

    def watch_second_order(self) -> None:
        """Look at the gradients of gradients, too, from now on."""

    def resumed(self, activations: list[Activation]) -> AbstractContextManager[None]:
        """Return the extent of a recomputation whose first run was inside `activations`."""

    def detach(self) -> None:
        """Stop intercepting and restore everything."""


class _State(threading.local):
    def __init__(self) -> None:
        #: The attachment whose session instruments this thread.
        self.attachment: Watcher | None = None
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
for _name, _field in extension.thread_fields().items():
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
