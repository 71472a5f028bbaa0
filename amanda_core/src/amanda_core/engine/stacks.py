"""The applied tools of each thread: their session, and the drivers that are attached for it.

Owns when drivers are attached and detached, and how tools that are applied to all threads reach
those that did not apply them. An exception may arrive at any line (Ctrl-C, an alarm). `begin` is
undone by `leave`, which can be repeated: it looks at what is there and does not count. Failures of
drivers and tools are kept for `Stack.take_failure`, so that they stop nothing. Over 400 lines: a
stack, and what changes the stacks of all threads at once.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard

from amanda_core.engine.session import Session
from amanda_core.engine.store import Store
from amanda_core.engine.tool import Tool, in_dependency_order
from amanda_core.errors import AmandaError, ConfigError, DriverError, annotate
from amanda_core.interface.driver import (
    Attachment,
    DescribingAttachment,
    NotifiedAttachment,
    ThreadedAttachment,
    ZonedAttachment,
)
from amanda_core.plugins import discovery
from amanda_core.plugins.declined_drivers import DeclinedDrivers
from amanda_core.runtime.containment import contain, described, driver_errors, without_exit
from amanda_core.runtime.started_processes import StartedProcesses
from amanda_core.runtime.switches import ROUTINE_DEPTH
from amanda_core.runtime.threads import THREAD, MarkedZone

if TYPE_CHECKING:
    from amanda_core.plugins.driver_failures import OnDriverError

__all__ = [
    "Stack",
    "ThreadsOption",
    "begin",
    "begin_zone",
    "check_threads",
    "entries_here",
    "is_started_by_python",
    "join",
    "leave",
]

ThreadsOption = Literal["own", "all"]

#: The capability of drivers that can attach in a thread that did not apply the tools.
_JOINS = "threads"


class Entry(Protocol):
    """Tools that were applied together, as seen from the stacks that contain them."""

    tools: tuple[Tool, ...]
    on_driver_error: OnDriverError
    threads: ThreadsOption
    #: That of the thread that applied them.
    _stack: Stack | None


def _is(attachment: Attachment, protocol: Any) -> TypeGuard[Any]:
    """Return True if an attachment has the attributes of a protocol, which its type decides."""
    key = type(attachment), protocol
    if key not in _FITS:
        _FITS[key] = isinstance(attachment, protocol)
    return _FITS[key]


class _Local(threading.local):
    def __init__(self) -> None:
        self.place = _Place()


#: All stacks, and the entries of them that are applied to every thread.
_STACKS: list[Stack] = []
_SHARED: list[Entry] = []
#: Stacks of threads that have ended, for others that need the same tools.
_IDLE: list[Stack] = []
#: Type of an attachment, protocol -> whether it has its attributes. To look takes 15 us.
_FITS: dict[tuple[type, Any], bool] = {}
#: Grows whenever `join` may answer differently than before.
_ASKED = [1]
#: Held while stacks of several threads change.
_LOCK = threading.RLock()
#: Held by the analysis of tools that several threads share.
ANALYSIS_TURN = threading.RLock()


class Stack:
    """The applied tools of one thread, in order of application, with their session and drivers.

    Attributes:
        entries: The tools that were applied together, each.
        thread: The thread.
        session: The session of the tools.
        attachments: Name of a driver -> its attachment.
        changing: Whether `change` has begun and not ended.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = list(entries)
        self.thread = threading.get_ident()
        self.attachments: dict[str, Attachment] = {}
        self.changing = False
        self._declined: DeclinedDrivers | None = None
        #: Tools that are no longer applied, and whose end has not been announced yet.
        self._ending: list[Tool] = []
        self._failure: BaseException | None = None
        hooks = discovery.plugin_manager()
        host = self._host()
        store = Store.resume(self._resolve(), host._store if host is not None else None)
        self.session = Session(store, hooks, self._resolve)
        self._adopt()

    def _resolve(self) -> tuple[Tool, ...]:
        """Return the tools of all entries and their dependencies, in order."""
        return in_dependency_order(tool for entry in self.entries for tool in entry.tools)

    def open(self) -> None:
        """Attach the drivers, and begin the first step."""
        THREAD.session = self.session
        self.session.listener = self.session.control.listener = self.changed
        declined = [driver for driver in discovery.drivers() if not self.attach(driver)]
        if declined and self.session.host is None:
            self._declined = DeclinedDrivers(self.session.warn_once, self.attach)
            self._declined.start(declined)
        self.session.begin_step()

    def enter_thread(self) -> None:
        """Make this the stack of the calling thread, after that of another one, which has ended."""
        self.thread = threading.get_ident()
        THREAD.control, THREAD.session = self.session.control, self.session
        THREAD.control.switches[ROUTINE_DEPTH] = 0  # As in `close`.
        for attachment in self.attachments.values():
            if _is(attachment, ThreadedAttachment):
                attachment.enter_thread()

    def changed(self) -> None:
        """Tell the attachments that a switch, the epoch or the threads have changed."""
        for name, attachment in tuple(self.attachments.items()):
            if _is(attachment, NotifiedAttachment):
                what = f"Driver {name!r} fails at a change of the switches or tools"
                try:
                    with driver_errors(what, passing=()):
                        attachment.changed()
                except DriverError as error:  # It must not leave a switch half entered.
                    self.session.defer(error)

    def attach(self, driver: discovery.Driver) -> bool:
        """Ask a driver to attach; return False if it declines."""
        if self.session.host is not None and _JOINS not in driver.info.capabilities_in(""):
            return False
        what = f"Driver {driver.info.name!r} of {driver.distribution} failed to attach"
        with driver_errors(what, passing=AmandaError):
            attachment = driver.call("amanda_attach", session=self.session)
        if attachment is None:
            return False
        self.attachments[driver.info.name] = attachment
        if _is(attachment, ZonedAttachment):
            for zone in THREAD.zones:
                zone.leaves.append(attachment.enter_zone(zone.name))
        describes = _is(attachment, DescribingAttachment)
        self.session.declare(driver.info, attachment.facts if describes else None)
        return True

    def change(self, entries: Sequence[Entry]) -> None:
        """Replace the entries, and end the tools that are no longer applied."""
        self.changing = True
        self.entries = list(entries)
        self._adopt()
        tools = self._resolve()
        left = [tool for tool in self.session.tools if tool not in tools]
        self._ending += [tool for tool in left if tool not in self._ending]
        self.session.set_tools(tools)
        self._end()
        self.changing = False

    def _guests(self) -> Iterator[Entry]:
        """Yield the entries that other threads have applied."""
        return (entry for entry in self.entries if entry._stack not in (None, self))

    def _host(self) -> Session | None:
        for entry in self._guests():
            if entry._stack is not None:
                return entry._stack.session
        return None

    def _adopt(self) -> None:
        """Give the session what depends on the entries, other than the tools."""
        # One entry that skips operators at which a driver fails is enough.
        skips = any(entry.on_driver_error == "skip" for entry in self.entries)
        self.session.set_policy("skip" if skips else "raise")
        shares = any(entry.threads == "all" for entry in self.entries)
        self.session.turn = ANALYSIS_TURN if shares else None
        self.session.set_host(self._host())
        for tool in self._resolve() if self.session.host is not None else ():
            tool._amanda.turn = tool._amanda.turn or threading.RLock()

    def close(self) -> None:
        """End the session, detach the drivers and end the tools."""
        session = self.session
        if THREAD.session is session:
            for zone in THREAD.zones:  # Detaching ends them.
                zone.leaves.clear()
            THREAD.session = None
        session.listener = session.control.listener = None
        if not session.closed:
            self._ending[:] = session.tools
            session.close()
        if self.thread == threading.get_ident():
            # A routine or replacement that was interrupted may not have restored it.
            session.control.switches[ROUTINE_DEPTH], session.control.original = 0, None
        if self._declined is not None:
            self._declined.stop()
        known = [held.detach for held in self.attachments.values()]
        # What drivers registered may be repeated, and they may not have returned an attachment.
        for detach in reversed([one for one in session.undo if one not in known]):
            self._detach("A driver failed to detach", detach, again=True)
        for name, held in reversed(self.attachments.items()):
            again = held.detach in session.undo
            self._detach(f"Driver {name!r} failed to detach", held.detach, again)
        session.undo.clear()
        self.attachments.clear()
        self._end()

    def _detach(self, what: str, detach: Callable[[], object], again: bool) -> None:
        try:
            with without_exit(what):
                detach()
        except BaseException as error:  # The other drivers must be detached nevertheless.
            self._fail(error, "driver failed to detach")
            if again:
                self._detach(what, detach, again=False)

    def _end(self) -> None:
        """Call the functions that tools which are no longer applied registered for their end.

        Tools of other threads end there.
        """
        others = [entry for entry in _SHARED if entry._stack not in (None, self)]
        applied = in_dependency_order(tool for entry in others for tool in entry.tools)
        while self._ending:
            tool = self._ending.pop(0)
            for function in () if tool in applied else tool._amanda.ends:
                try:
                    with without_exit(f"Tool {tool.tool_name} failed to end"):
                        function()
                except BaseException as error:  # The others must end nevertheless.
                    self._fail(error, "tool failed to end")

    def _fail(self, error: BaseException, what: str) -> None:
        if self._failure is None:
            self._failure = error
        elif error is not self._failure:
            annotate(self._failure, f"Another {what}: {error!r}")

    def take_failure(self) -> BaseException | None:
        """Return the first failure of a driver or tool while tools were removed, and forget it."""
        failure, self._failure = self._failure, None
        return failure


class _Place:
    """Where a thread keeps its stack. Tools that are still applied when it ends are removed.

    It is a thread-local object, so it is deleted with the thread.

    Attributes:
        stack: The applied tools, or None.
    """

    stack: Stack | None = None  # Of the class, as an exception may arrive before `__init__`.

    def __init__(self) -> None:
        self._process = os.getpid()

    def __del__(self) -> None:
        stack = self.stack
        # In a forked process the other threads are gone, and drivers detach by themselves.
        if stack is None or sys.is_finalizing() or os.getpid() != self._process:
            return
        with _LOCK:  # Others may remove theirs from it.
            own = [entry for entry in stack.entries if entry._stack is stack]
            if not own:
                # Its graphs may run backward in another thread, so its session must not end yet.
                if not stack.session.closed:
                    _IDLE.append(stack)
                return
            for entry in own:
                _withdraw(entry)
                entry._stack = None
            stack.close()
            _forget(stack)
        if (failure := stack.take_failure()) is not None:
            raise failure


_LOCAL = _Local()


def current() -> Stack | None:
    """Return the stack of the calling thread."""
    stack = _LOCAL.place.stack
    # One that only had tools of other threads may have been closed by them.
    return None if stack is None or stack.session.closed else stack


def entries_here() -> list[Entry]:
    """Return what the calling thread has applied, in order, also if that is half removed."""
    stack = _LOCAL.place.stack
    return [one for one in stack.entries if one._stack is stack] if stack is not None else []


def begin_zone(zone: MarkedZone) -> None:
    """Let the operators of this thread belong to a zone."""
    stack = current()
    for one in tuple(stack.attachments.values()) if stack is not None else ():
        if _is(one, ZonedAttachment):
            zone.leaves.append(one.enter_zone(zone.name))


def begin(entry: Entry) -> None:
    """Apply tools to the calling thread, and to all others if they are meant for those.

    After an exception, `leave` undoes what was done.
    """
    stack = current()
    if stack is not None:
        entry._stack = stack
        with _LOCK:
            stack.change([*stack.entries, entry])
    else:
        discovery.require_any()
        _new([*_SHARED, entry], entry).open()
    if entry.threads == "all":
        with _LOCK:
            _SHARED.append(entry)
            for other in [other for other in _STACKS if other is not entry._stack]:
                if not other.session.closed:
                    other.change([*other.entries, entry])
    _ask_again()


def _ask_again() -> None:
    """Let drivers ask again at operators of threads that `join` has answered for."""
    _ASKED[0] += 1
    stack = current()
    for attachment in tuple(stack.attachments.values()) if stack is not None else ():
        if _is(attachment, ThreadedAttachment):
            attachment.ask()


def _new(entries: Sequence[Entry], entry: Entry | None) -> Stack:
    """Make the stack of the calling thread."""
    with _LOCK:  # Another thread must not resume the same store.
        stack = Stack(entries)
        if entry is not None:
            entry._stack = stack
        _LOCAL.place.stack = stack
        _STACKS.append(stack)
        _STARTED.begin()
        stack.session.closed = False
    return stack


def leave(entry: Entry) -> None:
    """Remove tools from the stack of the calling thread, and from those of all others.

    It may be repeated after an exception at any line.
    """
    if (stack := entry._stack) is None:
        return
    for tool in stack.session.tools:
        _release(tool._amanda.turn)
    _withdraw(entry)
    with _LOCK:
        if entries := [other for other in stack.entries if other is not entry]:
            stack.change(entries)
    if not entries:
        stack.close()
        _forget(stack)
        if _LOCAL.place.stack is stack:
            _LOCAL.place.stack = None
    entry._stack = None


def _release(turn: Any) -> None:
    """Release what an exception has kept this thread from releasing: others would wait for it."""
    if turn is not None:
        with suppress(RuntimeError):
            while True:
                turn.release()


def _withdraw(entry: Entry) -> None:
    """Remove tools from the threads that did not apply them."""
    if entry not in _SHARED or (stack := entry._stack) is None:
        return
    with _LOCK:
        for other in [one for one in _STACKS if one is not stack]:
            if entry not in other.entries and not other.changing:
                continue
            host = other.session.host
            if entries := [one for one in other.entries if one is not entry]:
                other.change(entries)
            else:
                other.close()
                if host is not None:
                    new = [one for one in other.session.pending if one not in host.pending]
                    host.pending += new
            if (failure := other.take_failure()) is not None:
                stack.session.defer(failure)
            if not entries:
                _forget(other)
        _SHARED.remove(entry)
        _ASKED[0] += 1


def _forget(stack: Stack) -> None:
    with _LOCK:
        for stacks in (_STACKS, _IDLE):
            if stack in stacks:
                stacks.remove(stack)
        if not _STACKS:
            _STARTED.end()


def join(driver: str, op: str | None) -> bool:
    """Apply the tools for all threads to the calling thread, at an operator that it runs.

    A driver calls it at an operator of a thread in which it is not attached, and need not ask again
    in this thread until tools are applied. Without such tools, the results of those applied in
    other threads will say that this thread was not seen.

    Args:
        driver: Name of the driver.
        op: Type of the operator. None where none runs yet but tools should be applied, such as in
            the call of a module: then nothing is noted.

    Returns:
        Whether the driver is attached now, so that it must instrument the operator.
    """
    if THREAD.asked == _ASKED[0] or THREAD.control.switches[ROUTINE_DEPTH]:
        return False
    if (op is None and not _SHARED) or not THREAD.control.enabled:
        return False
    stack, why = None, ""
    try:
        THREAD.asked = _ASKED[0]
        stack = current()
        if stack is None and _can_join(driver):
            stack = _joined()
        elif stack is None:
            why = f" (the driver {driver!r} instruments only the thread that applied them)"
        elif stack.session.host is not None:
            for one in discovery.drivers():
                if one.info.name == driver and driver not in stack.attachments:
                    stack.attach(one)
    except Exception as error:  # It is not the program's, which would get it in this thread.
        contain(error)
        stack, why = None, f" ({described(error)})"
    except BaseException:
        THREAD.asked = 0  # The thread must not run without tools from now on.
        raise
    if stack is not None:
        return driver in stack.attachments
    if op is None:
        return False
    for other in tuple(_STACKS):
        # Those of tools for all threads are ending, unless they could not be applied.
        if why or other.session.turn is None:
            other.session.note_thread(op, why)
    return False


def _joined() -> Stack | None:
    """Apply the tools for all threads, if there are any, to the calling thread."""
    with _LOCK:  # Until it is among the stacks, from which the tools are removed.
        if not _SHARED:
            return None
        stack = next((stack for stack in _IDLE if stack.entries == _SHARED), None)
        try:
            if stack is not None:
                _LOCAL.place.stack = stack
                _IDLE.remove(stack)
                stack.enter_thread()
            else:
                stack = _new(_SHARED, None)
                stack.open()
            return stack
        except BaseException:
            _end_here()
            raise


def _end_here() -> None:
    """Undo what `_joined` has done."""
    if (stack := _LOCAL.place.stack) is not None:
        stack.close()
        _forget(stack)
        _LOCAL.place.stack = None


def is_started_by_python() -> bool:
    """Return True unless a framework has started the calling thread, whose ops are part of others.

    Threads that the program starts by `_thread` itself are taken for such, too.
    """
    ident = threading.get_ident()
    known = (thread for thread in threading.enumerate() if thread.ident == ident)
    return not isinstance(next(known, None), (type(None), threading._DummyThread))


def _can_join(driver: str) -> bool:
    return any(
        one.info.name == driver and _JOINS in one.info.capabilities_in("")
        for one in discovery.drivers()
    )


def check_threads(threads: str) -> None:
    """Raise an error unless `threads` is one of the two options.

    Raises:
        ConfigError: It is neither.
    """
    if threads not in ("own", "all"):
        raise ConfigError(
            f"threads={threads!r} is not an option",
            where="amanda.apply",
            fix="Pass 'own' or 'all'",
        )


def _forget_threads() -> None:
    # Of a forked process, in which only the calling thread is left, and runs without tools.
    _STACKS.clear()
    _SHARED.clear()
    _IDLE.clear()
    _STARTED.end()


def _tools() -> Iterable[Tool]:
    """Return the tools that are applied in any thread."""
    return {id(tool): tool for stack in tuple(_STACKS) for tool in stack.session.tools}.values()


def _note_fork() -> None:
    # What `subprocess` forks runs another program.
    if sys._getframe(1).f_globals.get("__name__") != "subprocess":
        _FORKS[0] += 1
        for tool in _tools():
            tool._amanda.unseen.forks += 1


def _note_started() -> None:
    for tool in _tools():
        tool._amanda.unseen.started += 1


_FORKS = [0]
_STARTED = StartedProcesses(_note_started, lambda: _FORKS[0])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_note_fork, after_in_child=_forget_threads)
