"""`Session`: the contexts, ids, analysis, epochs and pending errors of applied tools.

Owns the interface that drivers use while tools are applied. `store` keeps what resumes later,
`activation` applies and removes tools, and the drivers execute plans. A little over 400 lines: one
class, each method of which is called by a driver or by `activation`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from amanda_core.engine.action import POINTS, Action, IPoint
from amanda_core.engine.context import OpContext
from amanda_core.engine.store import Stage, Store
from amanda_core.errors import annotate, take
from amanda_core.interface.hookspecs import hookimpl
from amanda_core.plugins import discovery
from amanda_core.plugins.driver_failures import DriverFailures, OnDriverError
from amanda_core.runtime.containment import without_exit
from amanda_core.runtime.switches import CACHING, ENABLED, EPOCH, ROUTINE_DEPTH
from amanda_core.runtime.threads import THREAD, Control, WeakGroup
from amanda_core.runtime.warning_locations import warn

if TYPE_CHECKING:
    from amanda_core.engine.calls import Calls
    from amanda_core.engine.tool import Analysis, Tool
    from amanda_core.interface.driver import DriverInfo, Site
    from amanda_core.interface.facts import Facts
    from amanda_core.plugins.hook_manager import HookManager

__all__ = ["COMPILED_CALL", "COMPILED_KERNEL", "TRANSFORMED", "Session"]

#: Type of the operator that stands for a call of a compiled function (`Tool.sees_compiled_calls`).
COMPILED_CALL = "compiled_call"
#: Type of an operator that stands for a kernel inside such a call.
COMPILED_KERNEL = "compiled_kernel"
_COMPILED = COMPILED_CALL, COMPILED_KERNEL
#: The mode, in their namespace, of operators inside transforms of functions, which only tools with
#: `sees_transforms` are shown.
TRANSFORMED = "transformed"

T = TypeVar("T")

# How many combinations of nested tools one store distinguishes before plans are made again.
_EPOCHS_KEPT = 64
_NO_DRIVER = (None, None)
_NOTHING: Mapping[Any, Any] = {}


class Session:
    """The state of a stack of tools while it is applied in one thread.

    Attributes:
        tools: All applied tools, dependencies first, tools of nested `apply` last.
        epoch: Changes whenever a cached plan may be wrong. The same tools have the same epoch.
        control: The switches of the thread that owns the session.
        closed: Whether the tools are not applied yet, or were removed. Routines do not run then.
        undo: What drivers registered by `at_close`, the first registered first.
        wants_backward: Whether an applied tool analyses backward ops.
        watches_scopes: Whether an applied tool listens for module scopes or is shown values.
        sees_transforms: Whether an applied tool is shown operators inside transforms of functions.
        watches_calls: Whether an applied tool listens for calls of outermost modules or selects by
            them.
        needs_calls: Whether one of these tools cannot do without any of the calls.
        watches_values: Whether an applied tool is shown the inputs or outputs of modules.
        turn: Held by the analysis of tools that several threads share; None without such tools.
        host: The session of the thread that applied the tools to this one; None in that thread.
        call: Number of the running call of an outermost module; None outside of any.
        contended: Whether several tools have changed one value; `conflicts` tells which.
        pending: Exceptions that wait for `raise_pending`, oldest first.
    """

    # Slots, because these are read at every operator.
    __slots__ = ("__dict__", "__weakref__", "_analysing", "_hooks", "_store", "control", "epoch")

    _epochs = itertools.count(1)

    def __init__(
        self, store: Store, hooks: HookManager, resolve: Callable[[], Sequence[Tool]]
    ) -> None:
        self.control: Control = THREAD.control
        # The epoch is 0 until the tools are known.
        self.closed, self._step, self.epoch = True, 0, 0
        self.tools: tuple[Tool, ...] = ()
        self._policy: OnDriverError = "raise"
        self._store, self._hooks, self._resolve = store, hooks, resolve
        self._drivers: dict[str, tuple[DriverInfo | None, Facts | None]] = {}
        self.pending: list[BaseException] = []
        self.undo: list[Callable[[], object]] = []
        self._warned: set[str] = set()
        #: Called after each change of `epoch`.
        self.listener: Callable[[], None] | None = None
        self.watches_calls = self.needs_calls = self.watches_values = self.contended = False
        self.call: int | None = None
        self.turn: AbstractContextManager[object] | None = None
        self.host: Session | None = None
        #: The sessions of which this is the host.
        self._guests: WeakGroup[Session] = WeakGroup()
        store.session = self
        self.tools_changed()

    @cached_property
    def failures(self) -> DriverFailures:
        """The operators at which drivers themselves failed."""
        if self.host is not None:
            return self.host.failures
        return DriverFailures(self._policy, self.note_call)

    @cached_property
    def calls(self) -> Calls:
        """The calls and values of modules, if an applied tool requests them."""
        # Late, as it costs a hundredth of `import amanda`, and few sessions need it.
        from amanda_core.engine.calls import Calls

        self._shows_all = False
        return Calls(self)

    @cached_property
    def _weak(self) -> Any:
        """How contexts remember values for backward routines."""
        # It loads what is known of weights, and few sessions remember values.
        from amanda_core.runtime import weak

        return weak

    # For activation.

    def set_policy(self, policy: OnDriverError) -> None:
        """Choose what happens if a driver itself fails at an operator."""
        self._policy = policy
        if "failures" in self.__dict__:
            self.failures.policy = policy

    def set_host(self, host: Session | None) -> None:
        """Share the steps, warnings and failures of the thread that applied the tools."""
        if host is self.host:
            return
        if self.host is not None:
            self.host._guests.discard(self)
        self.host = host
        if host is not None:
            host._guests.add(self)
            self._step, self._warned = host._step, host._warned

    def set_tools(self, tools: Sequence[Tool]) -> None:
        """Set the applied tools, in order."""
        for tool in self.tools:
            tool._amanda.listeners.discard(self)
        self.tools = tuple(tools)
        for tool in self.tools:
            tool._amanda.listeners.add(self)
        self._refresh()

    @contextmanager
    def as_of(self, tools: Sequence[Tool], call: int | None = None) -> Iterator[None]:
        """Apply exactly `tools` inside `with`, as they were at an earlier time.

        This serves drivers that run a part of the forward program again. The epoch is the earlier
        one, unless a tool was invalidated since.

        Args:
            tools: The tools at that time.
            call: The value of `call` at that time.
        """
        before, now = self.tools, self.call
        try:
            self.call = call
            self.set_tools(tools)
            yield
        finally:
            self.call = now
            self.set_tools(before)

    def tools_changed(self) -> None:
        """Drop all cached plans after a tool registered something or was invalidated."""
        # The tool may have new dependencies.
        self.set_tools(self._resolve())

    def _refresh(self) -> None:
        self._stage = self._stage_now()
        epochs = self._store.epochs
        if len(epochs) >= _EPOCHS_KEPT:
            epochs.clear()
        before, self.epoch = self.epoch, epochs.setdefault(self._stage, next(self._epochs))
        self.control.switches[EPOCH] = self.epoch
        self._analysing = {
            point: [tool for tool in self.tools if tool._amanda.routines[point]] for point in POINTS
        }
        rules = [t for t in self.tools if t._amanda.before_rules or t._amanda.after_rules]
        self._has_rules = bool(rules)
        if not any(self._analysing.values()):
            # Rules serve the analysis of other tools. Without any, the rules themselves run.
            self._analysing = dict.fromkeys(POINTS, rules)
        self.wants_backward = any(p.is_backward for p in POINTS if self._analysing[p])
        self.watches_scopes = any(tool._amanda.scope for tool in self.tools)
        self._watches_steps = any(tool._amanda.step for tool in self.tools)
        self.sees_transforms = any(tool.sees_transforms for tool in self.tools)
        self._is_phased = any(tool._amanda.selection is not None for tool in self.tools)
        #: Whether no tool leaves out ordinary ops, so that `_selects` need not be asked of them.
        self._shows_all = not self._is_phased and "calls" not in self.__dict__
        if "calls" in self.__dict__ or any(tool._amanda.watches_modules for tool in self.tools):
            self.calls.refresh()
        if self.epoch != before and self.listener is not None:
            self.listener()

    @property
    def stages(self) -> Stage:
        """For each tool what its plans depend on: its number, its changes, and selected steps."""
        return self._stage

    def _stage_now(self) -> Stage:
        """Return what plans depend on: the tools' registrations and the steps they select."""
        at = self._step, self.call
        return tuple(
            (t.serial, t.generation, () if t.selection is None else t.selection.phase(*at))
            for t in (tool._amanda for tool in self.tools)
        )

    def _selects(self, tool: Tool, context: OpContext) -> bool:
        if "calls" in self.__dict__ and not self.calls.may_select(tool, context):
            return False
        if context._site.op_type in _COMPILED and not tool.sees_compiled_calls:
            return False
        if context._site.namespace.endswith(TRANSFORMED) and not tool.sees_transforms:
            return False
        selection = tool._amanda.selection
        if selection is None:
            return True
        chosen = selection(context, self._step, self.call)
        tool._amanda.unseen.add_choice(str(selection), chosen)
        return chosen

    def close(self) -> None:
        """End the session. Contexts stay in the store, and routines no longer run."""
        self.closed = True
        for context in tuple(self._store.contexts.values()):  # Another thread may add some.
            context.remembered = {}  # No routine will read them.
        for tool in self.tools:
            tool._amanda.listeners.discard(self)

    # For drivers: the state to consult.

    @property
    def enabled(self) -> bool:
        """True if operators of the calling thread must be instrumented now."""
        switched_on = self.control.switches[ENABLED] != 0 and not self.closed
        return switched_on and not THREAD.control.switches[ROUTINE_DEPTH]

    @property
    def caching(self) -> bool:
        """True if analysis runs once per op. If so, plans may be cached for one epoch."""
        return self.control.switches[CACHING] != 0

    def wants(self, i_point: IPoint) -> bool:
        """Return True if an applied tool analyses at `i_point`."""
        return bool(self._analysing[i_point])

    def can(self, capability: str, namespace: str) -> bool:
        """Return True if the driver of `namespace` declared `capability` for its mode."""
        info, _ = self._drivers.get(namespace.partition("/")[0], _NO_DRIVER)
        return info is None or capability in info.capabilities_in(namespace.rpartition("/")[2])

    def facts(self, namespace: str) -> Facts | None:
        """Return the facts about tensors from the driver of `namespace`; None if it has none.

        Args:
            namespace: Such as that of a context.
        """
        return self._drivers.get(namespace.partition("/")[0], _NO_DRIVER)[1]

    def declare(self, info: DriverInfo, facts: Facts | None = None) -> None:
        """Record the capabilities of an attached driver and its facts about tensors."""
        self._drivers[info.name] = info, facts

    def persistent(self, name: str, factory: Callable[[], T]) -> T:
        """Return an object of a driver that resumes with the contexts; the first call makes it."""
        kept = self._store.persistent
        if name not in kept:
            kept[name] = factory()
        return kept[name]  # type: ignore[no-any-return]

    def shared(self, name: str, factory: Callable[[], T]) -> T:
        """Return an object of a driver as `persistent` does, one for all threads under the tools.

        What names operators must be such an object, so that each has one id in all threads. Several
        threads use it at once.
        """
        kept = self._store.shared
        found = kept[name] if name in kept else kept.setdefault(name, factory())
        self._store.persistent[name] = found
        return found  # type: ignore[no-any-return]

    def at_close(self, detach: Callable[[], object]) -> None:
        """Call `detach` when the tools are removed, even if no attachment was returned.

        A driver calls this before it begins to attach: an exception such as Ctrl-C may arrive
        before the core gets the attachment. If `detach` raises, it is called once more. It must do
        what is left to do, and nothing after it has ended.
        """
        self.undo.append(detach)

    def contexts(self) -> Iterator[OpContext]:
        """Return all contexts so far, forward and backward."""
        return iter(tuple(self._store.contexts.values()))

    def splits(self, what: str) -> bool:
        """Return True if the parts of fused operators must run one by one; warn once.

        Args:
            what: Where a framework would run a fused operator now.
        """
        tools = [tool.tool_name for tool in self.tools if tool.needs_whole]
        if tools and self.enabled:
            self.warn_once(
                f"{what} is off while {', '.join(tools)} can look inside: its operators run one by "
                "one, so results may differ in the last bits. `tool.whole = False` keeps it."
            )
        return bool(tools) and self.enabled

    # For drivers: contexts and analysis.

    def open(
        self,
        site: Site,
        raw: Any,
        inputs: Sequence[Any] | None = None,
        attrs: Mapping[str, Any] | None = None,
        forward: OpContext | None = None,
        *,
        input_names: tuple[str, ...] = (),
        backward: bool = False,
        constant: Callable[[Any], Any] | None = None,
        recomputed: bool = False,
    ) -> OpContext:
        """Return the context of an op at the start of an execution.

        Args:
            site: The op's facts; its key decides which context it is.
            raw: The raw (backward) operator. Pass a weak reference if it is a part of the user's
                model, which a context must not keep alive.
            inputs: The inputs of a forward op, by position of the signature.
            attrs: Arguments that are not positions.
            forward: Context of the forward op of a backward op, if it has one.
            input_names: Names of the input positions, as far as known.
            backward: Whether this is a backward op.
            constant: Maps an input to its concrete value if it is a parameter or constant, else to
                None. The context keeps this function, so it must not hold a tensor.
            recomputed: Whether this repeats an earlier execution.
        """
        owner = None if forward is None else forward._key
        place, store = (site.namespace, backward, owner, site.key), self._store
        context = store.places.get(place)
        new = context is None
        if context is None:
            context = OpContext(self, site, forward, backward)
            context._place = place
            is_special = site.op_type in _COMPILED or site.namespace.endswith(TRANSFORMED)
            context._is_common = not is_special
        (execution := context.execution).clear()
        execution["open"], execution["inputs"] = True, inputs
        if context._known.get("input_names", input_names) != input_names:
            # Another overload of an operator such as `sum` has other positions.
            self.analyse_again(context, *POINTS)
        known = context._known = {"op": raw, "attrs": attrs or {}, "input_names": input_names}
        known["constant"], known["recomputed"] = constant, recomputed
        if new:
            switches = THREAD.control.switches
            depth = switches[ROUTINE_DEPTH]
            try:
                switches[ROUTINE_DEPTH] = depth + 1  # As `inside_routine`, which takes longer.
                store.contexts[context._key] = context
                self._hooks.direct.amanda_prepare_context(context=context)
                store.places[place] = context  # Only now: the next call takes it for prepared.
                switches[ROUTINE_DEPTH] = depth
            except BaseException:
                switches[ROUTINE_DEPTH] = depth
                self._drop(context)
                with without_exit("A plugin fails to prepare a context"):
                    raise
        return context

    def _drop(self, context: OpContext) -> None:
        self._store.contexts.pop(context._key, None)
        self._store.places.pop(context._place, None)
        self._store.ids.pop((context._backward, context._number), None)

    def forget(self, context: OpContext) -> None:
        """Drop the context of an op that can never run again, such as one of a dead model."""
        self._drop(context)
        for tool in self.tools:
            self._store.log_of(tool).pop(context._key, None)
        context._analysed, context._plans = {}, None

    def analyse_again(self, context: OpContext, *points: IPoint) -> None:
        """Drop what the analysis of `context` at the points requested, so that it runs again."""
        for point in points:
            for tool in self.tools:
                self._store.log_of(tool).get(context._key, {}).pop(point, None)
            context._analysed.pop(point, None)
        context._plans = None

    def analyse(self, context: OpContext, i_point: IPoint) -> None:
        """Run the analysis that is due for `context` at `i_point`."""
        if not self._analysing[i_point]:
            return
        is_done = context._analysed.get(i_point) == self.epoch
        if (is_done and self.control.switches[CACHING]) or not (due := self._due(context, i_point)):
            return
        trigger, turn = self._hooks.direct.amanda_trigger_callback, self.turn
        if turn is None and trigger == _PLUGIN.amanda_trigger_callback:
            self.run_analysis(context, i_point, due)
            return
        with turn or nullcontext():
            trigger(context=context, i_point=i_point)

    def due(self, context: OpContext, *points: IPoint) -> bool:
        """Return True if `analyse` would run the analysis of a tool at one of the points."""
        known = context._analysed if self.control.switches[CACHING] else {}
        for at in points:  # `any` takes longer, and each new op asks.
            if self._analysing[at] and known.get(at) != self.epoch and self._due(context, at):
                return True
        return False

    def run_analysis(
        self, context: OpContext, i_point: IPoint, due: Sequence[Tool] | None = None
    ) -> None:
        """Run the rules and analysis routines of the applied tools, in order.

        This is the core's implementation of `amanda_trigger_callback`.

        Args:
            context: The op's context.
            i_point: The point.
            due: The tools whose analysis is due, if they are known.

        Raises:
            BaseException: Whatever a routine raised, with a note. The analysis of its tool is not
                cached.
        """
        due = self._due(context, i_point) if due is None else due
        driver = context._site.namespace.partition("/")[0]
        if self.wants_backward and due and not self.can("gradients", f"{driver}/"):
            self.warn_once(
                f"The driver {driver!r} has no gradients: backward analysis routines do not run "
                "there."
            )
        context._plans, epoch = None, self.epoch
        switches = THREAD.control.switches
        depth = switches[ROUTINE_DEPTH]
        try:
            switches[ROUTINE_DEPTH] = depth + 1  # As in `open`.
            if self._has_rules:
                self._analyse_with_rules(context, i_point, due)
            else:
                for tool in due:
                    self._record(tool, context, i_point)
            switches[ROUTINE_DEPTH] = depth
        except BaseException:
            switches[ROUTINE_DEPTH] = depth
            raise
        if self.control.switches[CACHING] and epoch == self.epoch:
            context._analysed[i_point] = epoch

    def _analyse_with_rules(self, context: OpContext, i_point: IPoint, due: Sequence[Tool]) -> None:
        """Run the rules of the applied tools, and between them the routines of those due."""
        registered = [tool._amanda for tool in due]
        for tool in self.tools:
            for rule in tool._amanda.before_rules:
                self._call(rule, tool, context, i_point)
            if tool._amanda in registered:
                self._record(tool, context, i_point)
        try:
            for tool in reversed(self.tools):
                for rule in tool._amanda.after_rules:
                    self._call(rule, tool, context, i_point)
        except BaseException:
            # The rules belong to the analysis of all tools, so none of it is cached.
            for tool in due:
                self._store.log_of(tool).get(context._key, {}).pop(i_point, None)
            raise

    def _due(self, context: OpContext, i_point: IPoint) -> list[Tool]:
        caching, due = self.control.switches[CACHING], list["Tool"]()
        logs, key = self._store.logs, context._key
        is_shown = self._shows_all and context._is_common
        for tool in self._analysing[i_point]:
            known = tool._amanda
            is_new = not caching or i_point not in logs.get(known, _NOTHING).get(key, ())
            # Rules serve other tools as well, so a selection does not restrict them.
            if is_new and (is_shown or not known.routines[i_point] or self._selects(tool, context)):
                due.append(tool)
        if caching and not due:
            context._analysed[i_point] = self.epoch
        return due

    def _record(self, tool: Tool, context: OpContext, i_point: IPoint) -> None:
        logs, key = self._store.log_of(tool), context._key
        if (parts := context.get("parts_not_seen")) is not None:
            tool._amanda.unseen.add_inside(context.name, parts)
        old = logs[key].pop(i_point, ()) if key in logs else ()
        actions: list[Action] = []
        tool._amanda.analysed = True
        try:
            context._recorder = (tool, i_point, actions)
            for routine in tuple(tool._amanda.routines[i_point]):
                self._call(routine, tool, context, i_point)
        finally:
            context._recorder = None
        # What is in the log is not analysed again, even if an exception arrives here.
        context._has_actions |= bool(actions)
        logs.setdefault(key, {})[i_point] = tuple(actions)  # It may have been cleared.
        if not self.control.switches[CACHING] and (old or actions):
            # Plans that were cached before this analysis are no longer valid.
            tool._amanda.changed()

    def recorded(self, context: OpContext, action: Action) -> None:
        """Call the hook for an action that an analysis routine requested; plugins may refuse it."""
        try:
            self._hooks.direct.amanda_action_recorded(context=context, action=action)
        except BaseException:
            with without_exit("A plugin fails to look at an action"):
                raise

    def _call(self, routine: Analysis, tool: Tool, context: OpContext, i_point: IPoint) -> None:
        try:
            routine(context)
        except BaseException as error:
            name = getattr(routine, "__qualname__", repr(routine))
            annotate(
                error,
                f"In analysis by tool {tool.tool_name}, routine {name}, "
                f"{i_point.value}, {context.where}",
            )
            raise

    def actions_of(self, context: OpContext) -> list[Action]:
        """Return the logged actions of the applied tools for an op, in tool order."""
        found: list[Action] = []
        for tool in self.tools:
            log = self._store.logs.get(tool._amanda, _NOTHING).get(context._key)
            if log and ((self._shows_all and context._is_common) or self._selects(tool, context)):
                for point in POINTS if len(log) > 1 else log:
                    found += log.get(point, ())
        return found

    # For drivers: errors, warnings, steps and scopes.

    def defer(self, error: BaseException) -> None:
        """Keep an exception for `raise_pending` that cannot be raised where it occurred.

        If this session is closed and the same tools are applied again, their session gets the
        exception: a driver's compiled function may refer to either session.
        """
        self._store.session.pending.append(error)

    def raised(self, error: BaseException) -> None:
        """Turn deferred exceptions into notes on `error`, with which the program leaves `apply`.

        This happens if `error` is itself a deferred exception, and if it ends the program, such as
        KeyboardInterrupt: that must not be replaced by another error.
        """
        if not isinstance(error, Exception) or any(error is other for other in self.pending):
            take(self.pending, error)

    def raise_pending(self) -> None:
        """Raise the first deferred exception; the others become notes on it."""
        if self.pending:
            raise take(self.pending, self.pending[0])

    def warn_once(
        self, message: str, between: Iterable[str] = (), *, importing: bool = False
    ) -> None:
        """Warn with `AmandaWarning` of a line of the program, once in this session.

        Args:
            message: The text.
            between: Names of packages between the program and the driver, other than the framework.
            importing: Whether an import is running, which must not fail if warnings are errors.
        """
        if message not in self._warned:
            self._warned.add(message)
            warn(message, between, importing=importing)

    def may_edit(self, tool: Tool) -> bool:
        """Return True if a tool has changed values, or is likely to once it finds an operator."""
        from amanda_core.engine.writers import changes_values  # Late, as for calls.

        return changes_values(tool, self._store)

    def warn_of_writer(self, writer: str) -> None:
        """Warn, once, that a function of a framework writes the model without changes of tools.

        Args:
            writer: What the program calls it.
        """
        if "writers" in self._warned or not self.enabled:
            return
        from amanda_core.engine.writers import sentence_of_writer  # Late, as for calls.

        if sentence := sentence_of_writer(writer, self.tools, self._store):
            self._warned.add("writers")
            self.warn_once(sentence)

    def note_thread(self, op: str, why: str) -> None:
        """Note that operators of the calling thread run without tools."""
        ident = threading.get_ident()
        known = (f"{one.name!r}" for one in threading.enumerate() if one.ident == ident)
        name = f"thread {next(known, ident)}"
        for tool in self.tools:
            tool._amanda.unseen.add_thread(name, op, why)
        if "threads" in self._warned:
            return
        self._warned.add("threads")
        self.warn_once(
            f"Operators of {name} run without tools, {op} first{why}."
            + ' amanda.apply(..., threads="all") instruments every thread.' * (not why),
            importing=True,  # An error would reach a program in another thread.
        )

    def note_call(
        self,
        op: str,
        why: str,
        weights: Mapping[str, tuple[int, ...]] = _NOTHING,
        tools: Iterable[Tool] | None = None,
    ) -> None:
        """Note that an operator of the session's thread was called and not shown to the tools.

        Args:
            op: Its name.
            why: Where or why, as it follows "not seen".
            weights: The parameters that it read, as "root:name", and their shapes.
            tools: The tools to which it was not shown; None for all.
        """
        for tool in self.tools if tools is None else tools:
            tool._amanda.unseen.add_call(op, why, weights)

    def note_inside(self, op: str, why: str) -> None:
        """Note that an operator which is shown consists of others, which are not."""
        for tool in self.tools:
            tool._amanda.unseen.add_inside(op, why)

    def begin_step(self) -> None:
        """Notify the tools that a step begins, other than those of another thread."""
        self._notify(lambda tool: [begin for begin, _ in self._steps_of(tool)], self._step)

    def end_step(self) -> None:
        """Notify the tools that a step has ended and that the next one begins.

        A step of tools that are applied to all threads may end in any of them.
        """
        number = self._step
        if self.host is not None:
            self.host.end_step()
        if self._watches_steps:
            self._notify(lambda tool: [end for _, end in self._steps_of(tool)], number)
        self._set_step(number + 1)
        if self._watches_steps:
            self.begin_step()

    def _steps_of(self, tool: Tool) -> Sequence[Any]:
        return () if self.host is not None and tool in self.host.tools else tool._amanda.step

    def _set_step(self, number: int) -> None:
        self._step = number
        if self._is_phased:
            self._update_stage()
        if len(self._guests):  # Faster than to go over none, at each call of a jitted function.
            for guest in self._guests:
                guest._set_step(number)

    def _update_stage(self) -> None:
        if self._stage_now() != self._stage:
            self._refresh()

    def enter_scope(self, path: str) -> None:
        """Notify the tools that the module scope `path` is entered."""
        self._notify(lambda tool: [enter for enter, _ in tool._amanda.scope], path)

    def leave_scope(self, path: str) -> None:
        """Notify the tools that the module scope `path` is left."""
        self._notify(lambda tool: [leave for _, leave in tool._amanda.scope], path)

    def _notify(self, listeners: Callable[[Tool], Sequence[Any]], what: Any) -> None:
        for tool in self.tools if self.enabled else ():
            for listener in filter(None, listeners(tool)):
                switches = THREAD.control.switches
                depth = switches[ROUTINE_DEPTH]
                try:
                    switches[ROUTINE_DEPTH] = depth + 1
                    listener(what)
                    switches[ROUTINE_DEPTH] = depth
                except BaseException as error:
                    switches[ROUTINE_DEPTH] = depth
                    annotate(error, f"In a listener of tool {tool.tool_name} at {what!r}")
                    raise


class CorePlugin:
    """The core's own implementations of hooks. They run after those of other plugins."""

    @hookimpl(trylast=True)
    def amanda_trigger_callback(self, context: OpContext, i_point: IPoint) -> None:
        """Run the analysis that is due."""
        context._store.session.run_analysis(context, i_point)

    @hookimpl(trylast=True)
    def amanda_action_recorded(self, context: OpContext, action: Action) -> None:
        """Refuse a second replacement of an op."""
        context._refuse_conflict(action)


_PLUGIN = CorePlugin()
discovery.add_own(_PLUGIN, "amanda-core")
