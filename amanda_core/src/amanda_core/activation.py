"""Applying tools and leaving them, and the control API (paper, listing 5).

Owns the stack of applied tools of each thread and the lifetime of its session. Drivers are attached
when the stack gets its first entry and detached when it loses its last one. A little over 400
lines: the control API of the paper, half of it documentation.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, TypeVar

from amanda_core import discovery
from amanda_core.containment import driver_errors, without_exit
from amanda_core.driver import Attachment, CoverageGap, DescribingAttachment, NotifiedAttachment
from amanda_core.errors import (
    AmandaError,
    DriverError,
    ReentryError,
    ThreadError,
    ToolError,
    annotate,
)
from amanda_core.session import Session
from amanda_core.store import Store
from amanda_core.threads import THREAD
from amanda_core.tool import Tool, check_tool, in_dependency_order

# The rest is imported where it is needed: most applications of tools need none of it.
if TYPE_CHECKING:
    from amanda_core.conflicts import Conflict
    from amanda_core.declined_drivers import DeclinedDrivers
    from amanda_core.driver_failures import OnDriverError

__all__ = [
    "Applied",
    "Handle",
    "Switch",
    "apply",
    "attach",
    "autodiff_disabled",
    "autodiff_enabled",
    "cache_disabled",
    "cache_enabled",
    "disabled",
    "enabled",
    "step",
]

E = TypeVar("E", bound="_Extent")
F = TypeVar("F", bound=Callable[..., Any])

_LOCAL = threading.local()


class _Stack:
    """The applied tools of one thread, in order of application, with their session and drivers."""

    def __init__(self, first: Handle) -> None:
        self.entries = [first]
        self.thread = threading.get_ident()
        self.attachments: dict[str, Attachment] = {}
        self.declined: DeclinedDrivers | None = None
        #: Whether `open` has ended. Drivers that are asked later are asked during an import.
        self.opened = False
        hook = discovery.plugin_manager().hook
        self.session = Session(Store.resume(self.resolve()), hook, self.resolve)
        self.session.set_policy(first.on_driver_error)

    def resolve(self) -> tuple[Tool, ...]:
        """Return the tools of all entries and their dependencies, in order."""
        return in_dependency_order(tool for entry in self.entries for tool in entry.tools)

    def open(self) -> None:
        THREAD.session = self.session
        self.session.listener = self.session.control.listener = self.changed
        try:
            declined = [driver for driver in discovery.drivers() if not self.attach(driver)]
            if declined:
                from amanda_core.declined_drivers import DeclinedDrivers

                self.declined = DeclinedDrivers(self.session, self.attach)
                self.declined.start(declined)
            self.opened = True
            self.session.begin_step()
        except BaseException:
            self.close()
            raise

    def changed(self) -> None:
        """Tell the attachments that a switch or the epoch has changed."""
        for name, attachment in tuple(self.attachments.items()):
            if isinstance(attachment, NotifiedAttachment):
                what = f"Driver {name!r} fails at a change of the switches or tools"
                try:
                    with driver_errors(what, passing=()):
                        attachment.changed()
                except DriverError as error:  # It must not leave a switch half entered.
                    self.session.defer(error)

    def attach(self, driver: discovery.Driver) -> bool:
        what = f"Driver {driver.info.name!r} of {driver.distribution} failed to attach"
        with driver_errors(what, passing=AmandaError):
            attachment = driver.call("amanda_attach", session=self.session)
        if attachment is None:
            return False
        self.attachments[driver.info.name] = attachment
        describes = isinstance(attachment, DescribingAttachment)
        self.session.declare(driver.info, attachment.facts if describes else None)
        if self.session.wants_backward and "gradients" not in driver.info.capabilities_in(""):
            self.session.warn_once(
                f"The driver {driver.info.name!r} has no gradients: backward analysis routines do "
                "not run there.",
                importing=self.opened,
            )
        return True

    def change(self, entries: list[Handle]) -> None:
        self.entries = entries
        # One entry that skips operators at which a driver fails is enough.
        skips = any(entry.on_driver_error == "skip" for entry in entries)
        self.session.set_policy("skip" if skips else "raise")
        before = self.session.tools
        self.session.set_tools(self.resolve())
        self._end(tool for tool in before if tool not in self.session.tools)

    def _end(self, tools: Iterable[Tool]) -> None:
        if ending := [tool for tool in tools if tool._amanda.ends]:
            from amanda_core.tool_ends import end

            end(ending)

    def close(self) -> None:
        THREAD.session = None
        self.session.listener = self.session.control.listener = None
        self.session.close()
        if self.declined is not None:
            self.declined.stop()
        failure: BaseException | None = None
        for name, attachment in reversed(self.attachments.items()):
            try:
                with without_exit(f"Driver {name!r} failed to detach"):
                    attachment.detach()
            except BaseException as error:  # The other drivers must be detached nevertheless.
                if failure is None:
                    failure = error
                else:
                    annotate(failure, f"Another driver failed to detach: {error!r}")
        self.attachments.clear()
        try:
            self._end(self.session.tools)
        finally:
            if failure is not None:
                raise failure


class _ThreadsEnd:
    """Removes tools that are still applied when their thread ends.

    It is a thread-local object, so it is deleted with the thread.
    """

    def __init__(self, stack: _Stack) -> None:
        self._stack, self._process = stack, os.getpid()

    def __del__(self) -> None:
        # In a forked process the other threads are gone, and drivers detach by themselves.
        if self._stack.session.closed or sys.is_finalizing() or os.getpid() != self._process:
            return
        for entry in self._stack.entries:
            entry._stack = None
        self._stack.close()


class Handle:
    """Tools that are applied until `remove` is called, as returned by `attach`.

    Attributes:
        tools: The tools as given.
        on_driver_error: What happens if a driver itself fails at an operator.
    """

    def __init__(self, tools: Sequence[Tool], on_driver_error: OnDriverError = "raise") -> None:
        self.tools = tuple(tools)
        self.on_driver_error = on_driver_error
        self._stack: _Stack | None = None
        self._conflicts: list[Conflict] = []

    def _enter(self) -> None:
        if THREAD.control.routine_depth:
            raise ReentryError(
                "Tools cannot be applied inside a routine of a tool",
                fix="Apply them together, outside, or declare them with depends_on()",
            )
        stack = getattr(_LOCAL, "stack", None)
        if stack is not None:
            stack.change([*stack.entries, self])
            self._stack = stack
            return
        discovery.require_any()
        self._stack = _LOCAL.stack = _Stack(self)
        _LOCAL.end = _ThreadsEnd(self._stack)
        try:
            self._stack.open()
        except BaseException:
            self._stack = _LOCAL.stack = _LOCAL.end = None
            raise

    def remove(self) -> None:
        """Remove the tools; a second call does nothing.

        Raises:
            ThreadError: They were applied in another thread.
            BaseException: An exception of a routine that could not be raised where it occurred.
        """
        stack = self._stack
        if stack is None:
            return
        if threading.get_ident() != stack.thread:
            raise ThreadError(
                "The tools were applied in another thread",
                fix="Leave `apply` in the thread that entered it",
            )
        self.conflicts()  # Remember them: contexts may be gone afterwards.
        self._stack = None
        entries = [entry for entry in stack.entries if entry is not self]
        try:
            if entries:
                stack.change(entries)
            else:
                _LOCAL.stack = None
                try:
                    stack.close()
                finally:
                    _LOCAL.end = None
        finally:
            # Also if a driver fails to detach, so that neither error is lost.
            stack.session.raise_pending()

    def coverage(self) -> dict[str, list[CoverageGap]]:
        """Return what each driver does not instrument, by its name; empty after `remove`."""
        if self._stack is None:
            return {}
        failed = self._stack.session.failures.coverage
        attachments = self._stack.attachments
        return {name: [*held.coverage(), *failed(name)] for name, held in attachments.items()}

    def conflicts(self) -> list[Conflict]:
        """Return the values that several of the applied tools have changed, with the order of
        changes.

        Tools that change one value see each other's changes: dependencies first, otherwise in the
        order of `apply`. After `remove` the conflicts up to that call are returned.
        """
        session = self.session
        if session is not None and session.contended:
            from amanda_core.conflicts import conflicts

            self._conflicts = conflicts(session)
        return list(self._conflicts)

    @property
    def session(self) -> Session | None:
        """The session, while the tools are applied."""
        return self._stack.session if self._stack is not None else None


class _Extent(ContextDecorator):
    """A context manager that also decorates functions, so that each of their calls enters it."""

    #: The expression by which users make it, for messages.
    _written: str

    def __init__(self) -> None:
        #: What `__exit__` undoes, innermost last.
        self._entered: list[Any] = []

    def _recreate_cm(self: E) -> E:
        extent = copy.copy(self)
        extent._entered = []  # Threads that call a decorated function at once share nothing.
        return extent

    def __call__(self, func: F) -> F:
        """Decorate a function so that each of its calls enters this context manager."""
        # A call of such a function only makes an object, and its body runs after the exit.
        if (
            inspect.isgeneratorfunction(func)
            or inspect.iscoroutinefunction(func)
            or inspect.isasyncgenfunction(func)
        ):
            raise ToolError(
                f"{func.__qualname__} is a generator or coroutine function",
                where=f"@{self._written}",
                fix=f"Write `with {self._written}:` inside it",
            )
        return super().__call__(func)


class Applied(_Extent):
    """Applies tools as a context manager or a decorator, any number of times."""

    _written = "amanda.apply(...)"

    def __init__(self, tools: Sequence[Tool], on_driver_error: OnDriverError = "raise") -> None:
        super().__init__()
        self._tools, self._on_driver_error = tuple(tools), on_driver_error

    def __enter__(self) -> Handle:
        handle = Handle(self._tools, self._on_driver_error)
        handle._enter()
        self._entered.append(handle)
        return handle

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        handle = self._entered[-1]
        if error is not None and handle.session is not None:
            handle.session.raised(error)
        try:
            handle.remove()
        finally:
            # After an exit in another thread they stay applied: the right thread must exit.
            if handle.session is None:
                self._entered.remove(handle)


def apply(*tools: Tool, on_driver_error: OnDriverError = "raise") -> Applied:
    """Apply tools to every operator that runs inside a ``with`` statement or a decorated function.

    This covers each framework that has a driver, including frameworks that are imported later. It
    covers this thread and the threads that the framework runs on its behalf. Tools of an inner
    `apply` run after those of an outer one.

    Args:
        *tools: Instances of `Tool`. The tools that they depend on are applied, too.
        on_driver_error: What happens if a driver itself fails at an operator. ``"raise"`` raises
            the error with a note that it is Amanda's. ``"skip"`` runs the operator without tools,
            or keeps its result if it has already run, and lists it in `Handle.coverage`.

    Raises:
        ToolError: Something else was given.
        ConfigError: `on_driver_error` is neither.
        DependencyCycleError: The tools depend on one another.
        MissingDriverError: On entering, if no driver is installed.
        ReentryError: On entering, inside a routine.

    >>> from amanda_core.tool import Tool
    >>> applied = apply(Tool())
    """
    _check(tools, on_driver_error, "amanda.apply")
    in_dependency_order(tools)
    return Applied(tools, on_driver_error)


def attach(*tools: Tool, on_driver_error: OnDriverError = "raise") -> Handle:
    """Apply tools until the returned handle's ``remove()`` is called; see `apply`."""
    _check(tools, on_driver_error, "amanda.attach")
    handle = Handle(tools, on_driver_error)
    handle._enter()
    return handle


def _check(tools: Sequence[Tool], on_driver_error: OnDriverError, where: str) -> None:
    for tool in tools:
        check_tool(tool, where)
    if on_driver_error != "raise":
        from amanda_core.driver_failures import check_policy

        check_policy(on_driver_error)


def step() -> None:
    """End a step in a program without an optimizer or the run of a graph that would end it.

    Without applied tools this does nothing.
    """
    if THREAD.session is not None:
        THREAD.session.end_step()


class Switch(_Extent):
    """A switch of the control API, as a context manager or a decorator; switches nest."""

    def __init__(self, name: str, value: bool, function: str) -> None:
        super().__init__()
        self._name, self._value, self._written = name, value, f"amanda.{function}()"

    def __enter__(self) -> None:
        control = THREAD.control
        self._entered.append(control)
        control.enter(self._name, self._value, self)

    def __exit__(self, *_: object) -> None:
        self._entered.pop().leave(self._name, self)


def disabled() -> Switch:
    """Disable all tools in this thread, inside `with` or in a decorated function."""
    return Switch("enabled", False, "disabled")


def enabled() -> Switch:
    """Enable tools again inside `disabled`."""
    return Switch("enabled", True, "enabled")


def cache_disabled() -> Switch:
    """Run analysis at every execution of an op, instead of once."""
    return Switch("caching", False, "cache_disabled")


def cache_enabled() -> Switch:
    """Run analysis once per op again inside `cache_disabled`."""
    return Switch("caching", True, "cache_enabled")


def autodiff_enabled() -> Switch:
    """Differentiate the routines that are inserted inside; insertion reads the switch."""
    return Switch("autodiff", True, "autodiff_enabled")


def autodiff_disabled() -> Switch:
    """Do not differentiate the routines that are inserted inside, which is the default."""
    return Switch("autodiff", False, "autodiff_disabled")
