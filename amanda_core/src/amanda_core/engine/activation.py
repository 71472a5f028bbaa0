"""Applying tools and leaving them, and the control API (paper, listing 5).

Owns what users call; `stacks` owns the tools of each thread and their drivers. An exception may
arrive at any line, so entering and leaving can be repeated: an interrupted enter is undone, an
interrupted exit completed.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import threading
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, TypeVar

from amanda_core.engine import stacks
from amanda_core.engine.session import Session
from amanda_core.engine.stacks import ThreadsOption
from amanda_core.engine.tool import Tool, check_tool, in_dependency_order
from amanda_core.errors import ReentryError, ThreadError, ToolError, annotate, is_annotated
from amanda_core.interface.driver import CoverageGap
from amanda_core.plugins.driver_failures import OnDriverError, check_policy
from amanda_core.plugins.tracebacks import Folding, folded_modules
from amanda_core.runtime.threads import THREAD, Control, MarkedZone

if TYPE_CHECKING:
    from amanda_core.engine.conflicts import Conflict

__all__ = [
    "Applied",
    "Handle",
    "Switch",
    "Zone",
    "apply",
    "attach",
    "autodiff_disabled",
    "autodiff_enabled",
    "cache_disabled",
    "cache_enabled",
    "disabled",
    "enabled",
    "step",
    "zone",
]

E = TypeVar("E", bound="_Extent")
F = TypeVar("F", bound=Callable[..., Any])


class Handle:
    """Tools that are applied until `remove` is called, as returned by `attach`.

    Attributes:
        tools: The tools as given.
        on_driver_error: What happens if a driver itself fails at an operator.
        threads: Which threads are instrumented: ``own`` or ``all``.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        on_driver_error: OnDriverError = "raise",
        threads: ThreadsOption = "own",
    ) -> None:
        self.tools = tuple(tools)
        self.on_driver_error, self.threads = on_driver_error, threads
        self._stack: stacks.Stack | None = None
        self._entry: _Entry | None = None
        self._conflicts: list[Conflict] = []

    def _enter(self) -> None:
        _complete()
        if THREAD.control.routine_depth:
            raise ReentryError(
                "Tools cannot be applied inside a routine of a tool",
                fix="Apply them together, outside, or declare them with depends_on()",
            )
        stacks.begin(self)

    def remove(self) -> None:
        """Remove the tools; a second call does nothing, or completes an interrupted one.

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
        try:
            self.conflicts()  # Remember them: contexts may be gone afterwards.
            stacks.leave(self)
        except BaseException as error:
            self._abandon(error)
            raise
        try:
            if (failure := stack.take_failure()) is not None:
                raise failure
        finally:
            # Also if a driver fails to detach, so that neither error is lost.
            stack.session.raise_pending()

    def _abandon(self, error: BaseException) -> None:
        """Remove the tools because of an exception that may have arrived at any line."""
        if (stack := self._stack) is not None:
            stacks.leave(self)
            if (failure := stack.take_failure()) not in (None, error):
                annotate(error, f"Then also {type(failure).__name__}: {failure}")
            stack.session.raised(error)

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
            # Late, as it costs a hundredth of `import amanda`, and few programs ask.
            from amanda_core.engine.conflicts import conflicts

            self._conflicts = conflicts(session)
        return list(self._conflicts)

    @property
    def session(self) -> Session | None:
        """The session, while the tools are applied."""
        return self._stack.session if self._stack is not None else None


class _Entry:
    """One entry into an extent, whose exit may be called in vain.

    Attributes:
        exits: How many calls of the extent's `__exit__` are not the one of this entry.
    """

    def __init__(self, leave: functools._lru_cache_wrapper[None]) -> None:
        self._exit, self.exits = leave, leave.cache_info().misses

    def is_left(self) -> bool:
        """Return True if `__exit__` was called for this entry, even if none of its lines ran."""
        return self._exit.cache_info().misses > self.exits


def _complete() -> None:
    """Complete the exits of this thread that an exception has interrupted."""
    for handle in reversed(stacks.entries_here()):
        if isinstance(handle, Handle) and handle._entry is not None and handle._entry.is_left():
            stacks.leave(handle)
    THREAD.control.leave_all(lambda owner: isinstance(owner, _Entry) and owner.is_left())
    _complete_zones()


def _complete_zones() -> None:
    for zone in tuple(THREAD.zones):
        if isinstance(zone.owner, _Entry) and zone.owner.is_left():
            zone.leave(THREAD.zones)


class _Exit(property):
    """The `__exit__` of an extent, which differs by object.

    It is looked up in C: an exception that arrived in a line of Python then would come before the
    call, and the program would be left with the tools.
    """

    def __call__(self, extent: _Extent, *error: object) -> None:
        """Exit an extent, for those who have looked it up in its class."""
        extent._exit(*error)


class _Extent(ContextDecorator):
    """A context manager that also decorates functions, so that each of their calls enters it."""

    #: The expression by which users make it, for messages.
    _written: str

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        #: What `__exit__` undoes, innermost last.
        self._entered: list[Any] = []
        # In C: it counts a call before the first line of Python, where an exception may arrive.
        self._exit = functools.lru_cache(maxsize=0)(functools.partial(self._leave, self._entered))

    def _recreate_cm(self: E) -> E:
        extent = copy.copy(self)
        extent._reset()  # Threads that call a decorated function at once share nothing.
        return extent

    def _new_entry(self) -> _Entry:
        for _, outer in self._entered:
            outer.exits += 1
        return _Entry(self._exit)

    @staticmethod
    def _leave(entered: list[Any], *error: Any) -> None:
        """Undo the last entry."""
        raise NotImplementedError

    __exit__ = _Exit(operator.attrgetter("_exit"))

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

    def __init__(
        self,
        tools: Sequence[Tool],
        on_driver_error: OnDriverError = "raise",
        threads: ThreadsOption = "own",
    ) -> None:
        super().__init__()
        self._options = tuple(tools), on_driver_error, threads

    def __enter__(self) -> Handle:
        handle = Handle(*self._options)
        try:
            handle._enter()
            handle._entry = self._new_entry()
            self._entered.append((handle, handle._entry))
            return handle
        except BaseException as error:
            handle._abandon(error)
            raise

    @staticmethod
    def _leave(entered: list[tuple[Handle, _Entry]], *error: Any) -> None:
        try:
            handle, entry = entered[-1]
            if error[1] is not None and handle.session is not None:
                handle.session.raised(error[1])
            handle.remove()
            if error[1] is not None:
                Folding(error[1], folded_modules(wrappers=is_annotated(error[1]))).apply()
        except ThreadError:
            entry.exits += 1  # They stay applied: the right thread must exit.
            raise
        except BaseException as failure:
            entered[-1][0]._abandon(failure)
            raise
        finally:
            entered[:] = [one for one in entered if one[0].session is not None]


def apply(
    *tools: Tool, on_driver_error: OnDriverError = "raise", threads: ThreadsOption = "own"
) -> Applied:
    """Apply tools to every operator that runs inside a ``with`` statement or a decorated function.

    This covers each framework that has a driver, including frameworks that are imported later.
    Tools of an inner `apply` run after those of an outer one. An exception that leaves it has the
    traceback of the program without tools; that of a routine has the frames of the program and of
    the tool. With the environment variable ``AMANDA_TRACEBACK=full`` both have all frames.

    Args:
        *tools: Instances of `Tool`. The tools that they depend on are applied, too.
        on_driver_error: What happens if a driver itself fails at an operator. ``"raise"`` raises
            the error with a note that it is Amanda's. ``"skip"`` runs the operator without tools,
            or keeps its result if it has already run, and lists it in `Handle.coverage`.
        threads: ``"own"`` instruments this thread and the threads that the framework runs on its
            behalf. ``"all"`` instruments every thread of the program, those that run already
            included, until this thread leaves. A tool then keeps one account for all of them.

    Raises:
        ToolError: Something else was given.
        ConfigError: `on_driver_error` or `threads` has another value.
        DependencyCycleError: The tools depend on one another.
        MissingDriverError: On entering, if no driver is installed.
        ReentryError: On entering, inside a routine.

    >>> from amanda_core.engine.tool import Tool
    >>> applied = apply(Tool())
    """
    _check(tools, on_driver_error, threads, "amanda.apply")
    in_dependency_order(tools)
    return Applied(tools, on_driver_error, threads)


def attach(
    *tools: Tool, on_driver_error: OnDriverError = "raise", threads: ThreadsOption = "own"
) -> Handle:
    """Apply tools until the returned handle's ``remove()`` is called; see `apply`."""
    _check(tools, on_driver_error, threads, "amanda.attach")
    handle = Handle(tools, on_driver_error, threads)
    try:
        handle._enter()
        return handle
    except BaseException as error:
        handle._abandon(error)
        raise


def _check(tools: Sequence[Tool], on_driver_error: str, threads: str, where: str) -> None:
    for tool in tools:
        check_tool(tool, where)
    stacks.check_threads(threads)
    if on_driver_error != "raise":
        check_policy(on_driver_error)


def step() -> None:
    """End a step in a program without an optimizer or the run of a graph that would end it.

    Without applied tools this does nothing.
    """
    if THREAD.session is not None and not THREAD.session.closed:
        THREAD.session.end_step()


class Zone(_Extent):
    """A zone, as a context manager or a decorator; the innermost one counts."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self._written = name, f"amanda.zone({name!r})"

    def __enter__(self) -> None:
        _complete_zones()
        zones, entry = THREAD.zones, self._new_entry()
        mark = MarkedZone(self._name, entry)
        try:
            zones.append(mark)
            stacks.begin_zone(mark)
            self._entered.append(((zones, mark), entry))
        except BaseException:
            mark.leave(zones)
            raise

    @staticmethod
    def _leave(entered: list[tuple[tuple[list[MarkedZone], MarkedZone], _Entry]], *_: Any) -> None:
        (zones, mark), entry = entered[-1]
        try:
            mark.leave(zones)
        except BaseException:
            mark.leave(zones)
            raise
        finally:
            entered[:] = [one for one in entered if one[1] is not entry]


def zone(name: str) -> Zone:
    """Mark a part of a program that is not its model, inside `with` or in a decorated function.

    All operators that this thread calls inside belong to the zone, those of modules included. Tools
    leave them out, except with ``everything=True``. Some zones are found without marks:
    ``optimizer``, ``init``, ``data`` and ``metrics``. Without applied tools this does nothing.

    Args:
        name: The name of the zone, which `OpContext.zone` returns. ``"model"`` marks a part of the
            model inside another zone.

    Raises:
        ToolError: The name is not a string, or is empty.

    >>> with zone("metrics"):
    ...     pass
    """
    if not isinstance(name, str) or not name:
        raise ToolError(
            f"The name of a zone is {name!r}",
            where="amanda.zone",
            fix="Give it a name, such as 'metrics'",
        )
    return Zone(name)


class Switch(_Extent):
    """A switch of the control API for the calling thread, as a context manager and a decorator.

    It can be entered any number of times. Switches nest: the innermost one of a kind holds. As a
    decorator it raises `ToolError` for generator and coroutine functions.
    """

    def __init__(self, name: str, value: bool, function: str) -> None:
        super().__init__()
        self._name, self._value, self._written = name, value, f"amanda.{function}()"

    def __enter__(self) -> None:
        control, entry = THREAD.control, self._new_entry()
        try:
            control.enter(self._name, self._value, entry)
            self._entered.append(((control, self._name), entry))
        except BaseException:
            control.leave(self._name, entry)
            raise

    @staticmethod
    def _leave(entered: list[tuple[tuple[Control, str], _Entry]], *_: Any) -> None:
        (control, name), entry = entered[-1]
        try:
            control.leave(name, entry)
        except BaseException:
            control.leave(name, entry)
            raise
        finally:
            entered[:] = [one for one in entered if one[1] is not entry]


def disabled() -> Switch:
    """Disable all tools in this thread, inside `with` or in a decorated function.

    Returns:
        A context manager that is also a decorator.
    """
    return Switch("enabled", False, "disabled")


def enabled() -> Switch:
    """Enable tools again inside `disabled`; elsewhere this changes nothing.

    Returns:
        A context manager that is also a decorator.
    """
    return Switch("enabled", True, "enabled")


def cache_disabled() -> Switch:
    """Run analysis at every execution of an op in this thread, instead of once.

    Returns:
        A context manager that is also a decorator.
    """
    return Switch("caching", False, "cache_disabled")


def cache_enabled() -> Switch:
    """Run analysis once per op again inside `cache_disabled`; elsewhere this changes nothing.

    Returns:
        A context manager that is also a decorator.
    """
    return Switch("caching", True, "cache_enabled")


def autodiff_enabled() -> Switch:
    """Differentiate the routines that are inserted inside; insertion reads the switch.

    Enter it in an analysis routine, around the calls of `insert_before_op` and the like. It has no
    effect on a routine that observes.

    Returns:
        A context manager that is also a decorator.
    """
    return Switch("autodiff", True, "autodiff_enabled")


def autodiff_disabled() -> Switch:
    """Do not differentiate the routines that are inserted inside, which is the default.

    A gradient goes straight through an edit to the original value. The switch is needed only inside
    `autodiff_enabled`.

    Returns:
        A context manager that is also a decorator.
    """
    return Switch("autodiff", False, "autodiff_disabled")
