"""The driver's state of each thread: its attachment, the running modules, and what to ignore.

Owns the thread-local state that interceptors, patches and hooks share. It makes no decisions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

from amanda_core.driver_kit import Activation, Session
from amanda_core.interface import IPoint
from amanda_driver_torch.operators.operator import Operator
from amanda_driver_torch.torch_internals import extension

T = TypeVar("T")
R = TypeVar("R")

#: The instrumentation points as globals, which are read at every operator: reading a member of an
#: enumeration takes ten times as long.
BEFORE_FORWARD, AFTER_FORWARD, BEFORE_BACKWARD, AFTER_BACKWARD = IPoint


class Watcher(Protocol):
    """The attachment that instruments a thread, as seen from entry points.

    Attributes:
        session: Its session.
        watch: The native extension's part of it, or None.
        backward: The backward program.
        edits: Number of values edited and operators replaced so far.
        first_runs: Checkpointed functions (`Rerun`) that run for the first time now.
    """

    session: Session
    watch: Any
    backward: Any
    first_runs: list[Any]
    reductions: Any

    @property
    def edits(self) -> int:
        """Return the number of values edited and operators replaced so far."""
        ...

    def watching(self) -> bool:
        """Return True if operators that this thread calls now are instrumented."""

    def execute(self, operator: Operator, *call: Any) -> Any:
        """Execute one call of an operator: the function, its arguments, and those by keyword."""

    def execute_python(self, raw: Any, name: str, *call: Any) -> Any:
        """Execute one call of an operator written in Python or as a script."""

    def execute_collective(self, collective: Any, *call: Any) -> Any:
        """Execute one call of a method of a process group that communicates."""

    def expect_reduction(self, reducer: Any) -> None:
        """Note that a `DistributedDataParallel` module will reduce its gradients."""

    def execute_bucket(self, collective: Any, *call: Any) -> Any:
        """Execute one reduction of gradients in the backward pass of a module."""

    def report_failure(self, error: Exception, where: str) -> None:
        """Raise an error of the driver, or list it so that the program can go on."""

    def attempt(self, where: str, otherwise: T, work: Callable[..., T], *arguments: Any) -> T:
        """Do work of the driver that runs nothing of the program."""

    def why_eager(self, function: Any) -> str:
        """Return why a compiled function runs eagerly now; an empty string if it stays compiled."""

    def compiled_callback(self, original: Any) -> Any:
        """Return what Dynamo must call for a compiled callable; None to run it eagerly."""

    def call_module(self, module: Any, *call: Any) -> Any:
        """Call a module inside its scope."""

    def call_forward(self, module: Any, *call: Any) -> Any:
        """Run the `forward` of a module, which the program calls instead of the module."""

    def enter_zone(self, zone: str, frame: FrameType | None = None) -> Callable[[], None]:
        """Let operators belong to a zone; return a function that ends this."""

    def watch_second_order(self) -> None:
        """Analyse gradients of gradients, too, from now on."""

    def call_resumed(self, activations: list[Activation], function: Callable[..., T]) -> T:
        """Call what recomputes, whose first run was inside `activations`."""

    def detach(self) -> None:
        """Stop intercepting and restore everything."""


class _State(threading.local):
    def __init__(self) -> None:
        #: The attachment whose session instruments this thread.
        self.attachment: Watcher | None = None
        #: Module activations, outermost first.
        self.activations: list[Activation] = []
        #: More than 0 while operators are not the user's (printing, tracing, ...).
        self.quiet = 0
        #: The recordings of graphs of devices that go on, innermost last.
        self.recordings: list[Any] = []
        #: More than 0 inside an operator written in Python, or in the backward engine. A module
        #: called there resets it, since the operator is then only a container.
        self.opaque = 0
        #: The user's function modes while they are suspended, outermost last.
        self.suspended: list[Any] = []
        #: The mode of the function-mode interceptor, while it intercepts this thread.
        self.mode: object = None
        #: Python functions of torch that are being run for the operators inside them.
        self.transparent: list[Any] = []
        #: The number of nested backward passes in this thread.
        self.backward = 0
        #: Code of compiled callables that has been run eagerly since tools were applied, by id.
        self.not_compiled: dict[int, CodeType] = {}
        #: Context keys of what a stage of a pipeline computes now; None outside of stages.
        self.chunk: dict[str, int] | None = None
        #: Whether a checkpointed function is being recomputed.
        self.recomputing = False
        #: Ranges of torch's profiler that are zones, by id -> what ends the zone.
        self.ranges: dict[int, Callable[[], None]] = {}


# With the extension, some fields are stored where the native interceptor reads them.
for _name, _field in extension.thread_fields().items():
    setattr(_State, _name, _field)

STATE = _State()


def call_quietly(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Call `function` while all operators of this thread are ignored."""
    # Not a context manager, and not `finally`: an exception may arrive before they restore it.
    before = STATE.quiet
    try:
        STATE.quiet = before + 1
        result = function(*args, **kwargs)
        STATE.quiet = before  # Not one less: an exception may have left an inner call open.
        return result
    except BaseException:
        STATE.quiet = before
        raise


def call_opaquely(function: Callable[..., R], *args: Any) -> R:
    """Call `function` while operators of this thread are ignored, except inside called modules."""
    before = STATE.opaque
    try:
        STATE.opaque = before + 1
        result = function(*args)
        STATE.opaque = before
        return result
    except BaseException:
        STATE.opaque = before
        raise
