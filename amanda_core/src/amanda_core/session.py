"""`Session`: the contexts, ids, analysis, epochs and pending errors of applied tools.

Owns the interface that drivers use while tools are applied. `store` keeps what resumes later,
`activation` applies and removes tools, and the drivers execute plans. A little over 400 lines: one
class, each method of which is called by a driver or by `activation`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from amanda_core.action import POINTS, Action, IPoint
from amanda_core.containment import without_exit
from amanda_core.context import OpContext
from amanda_core.errors import annotate
from amanda_core.store import Stage, Store
from amanda_core.switches import CACHING, ENABLED, EPOCH, ROUTINE_DEPTH
from amanda_core.threads import THREAD, Control, inside_routine

if TYPE_CHECKING:
    import pluggy

    from amanda_core.calls import Calls
    from amanda_core.driver import DriverInfo, Site
    from amanda_core.driver_failures import DriverFailures, OnDriverError
    from amanda_core.facts import Facts
    from amanda_core.tool import Analysis, Tool

__all__ = ["Session"]

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
        closed: Whether the tools were removed. Routines no longer run then.
        wants_backward: Whether an applied tool analyses backward ops.
        watches_scopes: Whether an applied tool listens for module scopes or is shown values.
        watches_calls: Whether an applied tool listens for calls of outermost modules or selects by
            them.
        watches_values: Whether an applied tool is shown the inputs or outputs of modules.
        call: Number of the running call of an outermost module; None outside of any.
        contended: Whether several tools have changed one value; `conflicts` tells which.
        pending: Exceptions that wait for `raise_pending`, oldest first.
    """

    # Slots, because these are read at every operator.
    __slots__ = ("__dict__", "__weakref__", "_analysing", "_hook", "_store", "control", "epoch")

    _epochs = itertools.count(1)

    def __init__(
        self, store: Store, hook: pluggy.HookRelay, resolve: Callable[[], Sequence[Tool]]
    ) -> None:
        self.control: Control = THREAD.control
        # The epoch is 0 until the tools are known.
        self.closed, self._step, self.epoch = False, 0, 0
        self.tools: tuple[Tool, ...] = ()
        self._policy: OnDriverError = "raise"
        self._store, self._hook, self._resolve = store, hook, resolve
        self._drivers: dict[str, tuple[DriverInfo | None, Facts | None]] = {}
        self.pending: list[BaseException] = []
        self._warned: set[str] = set()
        #: Called after each change of `epoch`.
        self.listener: Callable[[], None] | None = None
        self.watches_calls = self.watches_values = self.contended = False
        self.call: int | None = None
        store.session = self
        self.tools_changed()

    # Few sessions need these, so they are imported late.

    @cached_property
    def failures(self) -> DriverFailures:
        """The operators at which drivers themselves failed."""
        from amanda_core.driver_failures import DriverFailures

        return DriverFailures(self._policy)

    @cached_property
    def calls(self) -> Calls:
        """The calls and values of modules, if an applied tool requests them."""
        from amanda_core.calls import Calls

        return Calls(self)

    @cached_property
    def _weak(self) -> Any:
        """How contexts remember values for backward routines."""
        from amanda_core import weak

        return weak

    # For activation.

    def set_policy(self, policy: OnDriverError) -> None:
        """Choose what happens if a driver itself fails at an operator."""
        self._policy = policy
        if "failures" in self.__dict__:
            self.failures.policy = policy

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
        before, now, self.call = self.tools, self.call, call
        self.set_tools(tools)
        try:
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
            point: [tool for tool in self.tools if tool._amanda.routines[point]] for point in IPoint
        }
        rules = [t for t in self.tools if t._amanda.before_rules or t._amanda.after_rules]
        self._has_rules = bool(rules)
        if not any(self._analysing.values()):
            # Rules serve the analysis of other tools. Without any, the rules themselves run.
            self._analysing = dict.fromkeys(IPoint, rules)
        self.wants_backward = any(p.is_backward for p in IPoint if self._analysing[p])
        self.watches_scopes = any(tool._amanda.scope for tool in self.tools)
        if "calls" in self.__dict__ or any(tool._amanda.watches_modules for tool in self.tools):
            self.calls.refresh()
        if self.epoch != before and self.listener is not None:
            self.listener()

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
        selection = tool._amanda.selection
        return selection is None or selection(context, self._step, self.call)

    def close(self) -> None:
        """End the session. Contexts stay in the store, and routines no longer run."""
        self.closed = True
        for context in self._store.contexts.values():
            context.remembered = {}  # No routine will read them.
        for tool in self.tools:
            tool._amanda.listeners.discard(self)

    # For drivers: the state to consult.

    @property
    def enabled(self) -> bool:
        """Whether operators of the calling thread must be instrumented now."""
        switched_on = self.control.switches[ENABLED] != 0 and not self.closed
        return switched_on and not THREAD.control.switches[ROUTINE_DEPTH]

    @property
    def caching(self) -> bool:
        """Whether analysis runs once per op. If so, plans may be cached for one epoch."""
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

    def contexts(self) -> Iterator[OpContext]:
        """Return all contexts so far, forward and backward."""
        return iter(tuple(self._store.contexts.values()))

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
            context = store.places[place] = OpContext(self, site, forward, backward)
            store.contexts[context._key], context._place = context, place
        (execution := context.execution).clear()
        execution["open"], execution["inputs"] = True, inputs
        if context._known.get("input_names", input_names) != input_names:
            # Another overload of an operator such as `sum` has other positions.
            self.analyse_again(context, *POINTS)
        known = context._known = {"op": raw, "attrs": attrs or {}, "input_names": input_names}
        known["constant"], known["recomputed"] = constant, recomputed
        if new:
            switches = THREAD.control.switches
            switches[ROUTINE_DEPTH] += 1  # As `inside_routine` does, which takes longer.
            try:
                hook = self._hook.amanda_prepare_context
                for plugin in reversed(hook.get_hookimpls()):
                    if plugin.wrapper or plugin.hookwrapper:  # These come first.
                        hook(context=context)
                        break
                    # Without them, the way through pluggy takes longer than the plugins do.
                    plugin.function(context) if plugin.argnames else plugin.function()
            except BaseException:
                self._drop(context)  # The next call must not take it for a prepared one.
                with without_exit("A plugin fails to prepare a context"):
                    raise
            finally:
                switches[ROUTINE_DEPTH] -= 1
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
        if self._analysing[i_point] and (due := self._due(context, i_point)):
            hook = self._hook.amanda_trigger_callback
            # Without other plugins it is the core's own; the way through pluggy takes as long.
            if len(hook.get_hookimpls()) > 1:
                hook(context=context, i_point=i_point)
            else:
                self.run_analysis(context, i_point, due)

    def due(self, context: OpContext, *points: IPoint) -> bool:
        """Return True if `analyse` would run the analysis of a tool at one of the points."""
        known = context._analysed if self.control.switches[CACHING] else {}
        for at in points:  # `any` takes longer, and each new op asks.
            if self._analysing[at] and known.get(at) != self.epoch and self._due(context, at):
                return True
        return False

    def run_analysis(self, context: OpContext, i_point: IPoint, known: Sequence[Tool] = ()) -> None:
        """Run the rules and analysis routines of the applied tools, in order.

        This is the core's implementation of `amanda_trigger_callback`. `known` are the tools whose
        analysis is due, if the caller has found them.

        Raises:
            BaseException: Whatever a routine raised, with a note. The analysis of its tool is not
                cached.
        """
        due = known or self._due(context, i_point)
        context._plans, epoch = None, self.epoch
        switches = THREAD.control.switches
        switches[ROUTINE_DEPTH] += 1  # As in `open`.
        try:
            if self._has_rules:
                from amanda_core.rules import analyse

                analyse(self, context, i_point, due)
            else:
                for tool in due:
                    self._record(tool, context, i_point)
        finally:
            switches[ROUTINE_DEPTH] -= 1
        if self.control.switches[CACHING] and epoch == self.epoch:
            context._analysed[i_point] = epoch

    def _due(self, context: OpContext, i_point: IPoint) -> list[Tool]:
        caching = self.control.switches[CACHING]
        due: list[Tool] = []
        if caching and context._analysed.get(i_point) == self.epoch:
            return due
        logs, key = self._store.logs, context._key
        for tool in self._analysing[i_point]:
            is_new = not caching or i_point not in logs.get(tool._amanda, _NOTHING).get(key, ())
            # Rules serve other tools as well, so a selection does not restrict them.
            if is_new and (not tool._amanda.routines[i_point] or self._selects(tool, context)):
                due.append(tool)
        if caching and not due:
            context._analysed[i_point] = self.epoch
        return due

    def _record(self, tool: Tool, context: OpContext, i_point: IPoint) -> None:
        logs, key = self._store.log_of(tool), context._key
        old = logs[key].pop(i_point, ()) if key in logs else ()
        actions: list[Action] = []
        context._recorder = (tool, i_point, actions)
        tool._amanda.analysed = True
        try:
            for routine in tuple(tool._amanda.routines[i_point]):
                self._call(routine, tool, context, i_point)
        finally:
            context._recorder = None
        logs.setdefault(key, {})[i_point] = tuple(actions)  # It may have been cleared.
        context._has_actions |= bool(actions)
        if not self.control.caching and (old or actions):
            # Plans that were cached before this analysis are no longer valid.
            tool._amanda.changed()

    def recorded(self, context: OpContext, action: Action) -> None:
        """Call the hook for an action that an analysis routine requested; plugins may refuse it."""
        hook = self._hook.amanda_action_recorded
        if len(hook.get_hookimpls()) > 1:
            with without_exit("A plugin fails to look at an action"):
                hook(context=context, action=action)
        elif action.kind.is_replacement:  # It is the core's own, as in `analyse`.
            context._refuse_conflict(action)

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
            if log and self._selects(tool, context):
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
        from amanda_core.deferred import take

        if not isinstance(error, Exception) or any(error is other for other in self.pending):
            take(self.pending, error)

    def raise_pending(self) -> None:
        """Raise the first deferred exception; the others become notes on it."""
        if self.pending:
            from amanda_core.deferred import take

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
            from amanda_core.warning_locations import warn

            self._warned.add(message)
            warn(message, between, importing=importing)

    def begin_step(self) -> None:
        """Notify the tools that a step begins."""
        self._notify(lambda tool: [begin for begin, _ in tool._amanda.step], self._step)

    def end_step(self) -> None:
        """Notify the tools that a step has ended and that the next one begins."""
        self._notify(lambda tool: [end for _, end in tool._amanda.step], self._step)
        self._step += 1
        self._update_stage()
        self.begin_step()

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
                try:
                    with inside_routine():
                        listener(what)
                except BaseException as error:
                    annotate(error, f"In a listener of tool {tool.tool_name} at {what!r}")
                    raise
