"""`Tool`: the base class of tools, with registration, dependencies and invalidation.

Owns a tool's own state and the dependency order. It does not know sessions; it only notifies
listeners of changes. The methods' names and signatures are the paper's (listing 2).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from amanda_core.engine.action import IPoint
from amanda_core.engine.selection import Patterns, Selection
from amanda_core.engine.unseen import Unseen, saying_what_was_not_seen
from amanda_core.errors import DependencyCycleError, SelectionError, ToolError
from amanda_core.runtime.threads import WeakGroup

if TYPE_CHECKING:
    from amanda_core.engine.calls import Call, Registered
    from amanda_core.engine.context import OpContext
    from amanda_core.interface.facts import Facts

__all__ = ["Tool", "in_dependency_order"]

Analysis = Callable[["OpContext"], None]
StepListener = Callable[[int], None]
ScopeListener = Callable[[str], None]
CallListener = Callable[["Call"], None] | None
T = TypeVar("T", bound="Tool")


_COPIED = (
    *("routines", "before_rules", "after_rules", "step", "scope", "ends", "modules"),
    *("dependencies", "selection"),
)


class _Registrations:
    """The registrations of one tool, and its actions in the sessions that applied it."""

    _serials = itertools.count()

    def __init__(self) -> None:
        #: Unique in this process, unlike the tool's address.
        self.serial = next(self._serials)
        #: Counts the changes after which plans that were made with this tool are no longer valid.
        self.generation = 0
        self.routines: dict[IPoint, list[Analysis]] = {point: [] for point in IPoint}
        #: Whether one of them was ever called.
        self.analysed = False
        #: Whether an inserted routine ever returned values.
        self.returned = False
        self.before_rules: list[Analysis] = []
        self.after_rules: list[Analysis] = []
        self.step: list[tuple[StepListener | None, StepListener | None]] = []
        self.scope: list[tuple[ScopeListener | None, ScopeListener | None]] = []
        self.ends: list[Callable[[], None]] = []
        #: The registrations of `calls`; None if the tool has none.
        self.modules: Any = None
        self.dependencies: list[Tool] = []
        #: The ops and steps that the tool is for; None for all.
        self.selection: Selection | None = None
        #: Called when the registrations change or the tool is invalidated.
        self.listeners: WeakGroup[Any] = WeakGroup()
        #: The stores that keep actions of the tool. They do not live as long as it.
        self.stores_with_actions: WeakGroup[Any] = WeakGroup()
        #: Tools of one `apply` (by identity) -> the store to resume. Held by the newest of them.
        self.stores: dict[tuple[int, ...], Any] = {}
        #: Held by the routines of the tool once several threads run them.
        self.turn: Any = None
        #: What drivers did not show the tool.
        self.unseen = Unseen()

    @property
    def watches_modules(self) -> bool:
        """True if the tool uses the calls of outermost modules or the values of modules."""
        return bool(self.modules or (self.selection and self.selection.by_call))

    def changed(self) -> None:
        self.generation += 1
        for listener in tuple(self.listeners):
            listener.tools_changed()

    def __reduce__(self) -> Any:
        # A copied tool starts without sessions: contexts and plans belong to the original.
        return _Registrations, (), {name: getattr(self, name) for name in _COPIED}


class Tool:
    """An instrumentation tool: analysis routines that decide what is inserted where.

    Subclass it, or create an instance and register functions. A subclass may leave out
    ``super().__init__()``.

    >>> tool = Tool()
    >>> tool.add_inst_for_op(lambda context: print(context.get_op()))
    """

    #: Whether its routines run before those of other tools before an op, and after those
    #: after it. Set by classes of tools that must see the values as the program has them.
    outermost: ClassVar[bool] = False
    #: Whether its observers must run at the time of their op, such as those that measure time or
    #: memory. A driver may run those of other tools later, in the same order.
    immediate: bool = False
    #: Whether frameworks must run the parts of fused operators one by one where they can, because
    #: the tool looks at what is inside or edits it. None stands for tools that select by module.
    whole: bool | None = None
    #: Whether its routines change values of the program. None: seen from what they have done.
    changes_values: bool | None = None
    #: Patterns of the namespaces in which the tool works, as in mapping rules, for lists of tools.
    #: Empty if it needs no framework of its own.
    works_on: ClassVar[tuple[str, ...]] = ()
    #: The figures that ``figures()`` of its results returns, for limits such as those of `amanda
    #: run`: name -> unit, which is ``s``, ``B``, ``%`` (a share of 1) or empty.
    figures: ClassVar[Mapping[str, str]] = {}
    #: Whether it is shown each call of a compiled function as an operator ``compiled_call``, and
    #: the kernels in it as operators ``compiled_kernel`` where a driver knows them. Other tools do
    #: not see these. A call ends when what it returns has been computed.
    sees_compiled_calls: ClassVar[bool] = False
    #: Whether it is shown operators inside transforms of functions, such as ``vmap`` and ``grad``
    #: of `torch.func`, where a framework runs them on values of its own. Other tools are told that
    #: they do not see these.
    sees_transforms: bool = False
    #: Whether its observers are called for each example of a function that a program maps, as
    #: `jax.vmap` does. Those of other tools are called once with the values of all examples, and
    #: `context.facts.batch_axes(value)` returns the axes of these.
    by_example: bool = False
    #: Whether frameworks must run compiled functions operator by operator where they can.
    uncompiled = False
    #: Whether analysis is for `amanda.exported`, where only staged routines may edit.
    is_exported = False
    _amanda: _Registrations

    def __new__(cls, *args: Any, **kwargs: Any) -> Tool:  # noqa: D102  Not for calling.
        # Here and not in __init__, so that a subclass need not call super().__init__().
        self = super().__new__(cls)
        self._amanda = _Registrations()
        return self

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if inspect.isfunction(result := vars(cls).get("result")):
            cls.result = saying_what_was_not_seen(result)  # type: ignore[attr-defined]

    @property
    def is_restricted(self) -> bool:
        """Return True if `where` restricts the tool to some ops or steps."""
        return self._amanda.selection is not None

    @property
    def needs_whole(self) -> bool:
        """Return True if frameworks must run the parts of fused operators one by one (`whole`)."""
        if self.whole is None:
            return self._amanda.selection is not None and self._amanda.selection.by_module
        return self.whole

    def not_seen(self) -> list[str]:
        """Return what the program executed and the tool was not shown, as sentences.

        Such are operators of other threads, those inside transforms that a driver does not see
        into, and the parts of fused operators. What `result` returns says it, too, if it has a list
        of `notes`.
        """
        return list(self._amanda.unseen.lines(self._amanda.stores_with_actions))

    def weights_not_seen(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the parameters that operators read which the tool was not shown; see `not_seen`.

        Returns:
            ``root:name`` -> the parameter's shape, and a sentence that says where it is read.
        """
        return dict(self._amanda.unseen.weights)

    def add_inst_for_op(
        self, callback: Analysis, backward: bool = False, require_outputs: bool = False
    ) -> None:
        """Register an analysis routine for every op (paper, listing 2).

        Args:
            callback: Called with the op's context, once per op and session.
            backward: Whether it is for ops of the backward program instead of the forward one.
            require_outputs: Whether it is called after the op has run instead of before.

        Raises:
            ToolError: `callback` cannot be called.
        """
        self._check_callable(callback, "add_inst_for_op")
        point = IPoint.of(backward, require_outputs)
        self._amanda.routines[point].append(callback)
        # Analyse ops again that were analysed at this point without the new routine.
        for store in tuple(self._amanda.stores_with_actions):
            for log in store.log_of(self).values():
                log.pop(point, None)
        self._amanda.changed()

    def add_context_rule(
        self, before: Analysis | None = None, after: Analysis | None = None
    ) -> None:
        """Register functions that transform contexts around the analysis of other tools.

        They run at each point at which an applied tool analyses, or at all points if none does.
        `before` runs in tool order, ahead of the routines of the tools that depend on this one.
        `after` runs in reverse tool order, after all routines. The paper's mapping tool is made of
        these.
        """
        for rule in (before, after):
            if rule is not None:
                self._check_callable(rule, "add_context_rule")
        if before is not None:
            self._amanda.before_rules.append(before)
        if after is not None:
            self._amanda.after_rules.append(after)
        self._amanda.changed()

    def add_inst_for_step(
        self, begin: StepListener | None = None, end: StepListener | None = None
    ) -> None:
        """Register functions for the begin and end of a step (the paper's iteration point).

        Each gets the number of the step, from 0. The backend decides what ends a step: an
        optimizer's step, an outermost run of a graph, or a call of `amanda.step`.
        """
        self._amanda.step.append((begin, end))
        self._amanda.changed()

    def add_inst_for_scope(
        self, enter: ScopeListener | None = None, leave: ScopeListener | None = None
    ) -> None:
        """Register functions for entering and leaving a module scope; each gets its path."""
        self._amanda.scope.append((enter, leave))
        self._amanda.changed()

    def add_inst_for_end(self, end: Callable[[], None]) -> None:
        """Register a function that runs once the tool is no longer applied, on any path out.

        Stop there what the tool started outside of its routines, such as a profiler.
        """
        self._amanda.ends.append(end)

    def add_inst_for_call(
        self, begin: CallListener = None, end: CallListener = None, *, needed: bool = True
    ) -> None:
        """Register functions for the begin and end of each call of an outermost module.

        Each gets the `amanda_core.engine.calls.Call`. In a decoding loop, such as that of
        ``generate``, the first call of a step processes the prompt, and each further one the next
        tokens. If not all calls are `needed`, a compiled callable stays compiled although its graph
        holds the call of a module, of which the functions do not learn.
        """
        asked = _registered(self)
        asked.listeners.append((begin, end))
        asked.needed |= needed
        self._amanda.changed()

    def show_modules(
        self, module: Patterns, *, inputs: bool = False, outputs: bool = False
    ) -> None:
        """Show this tool operators for the inputs and outputs of modules.

        In each call of a chosen module, an operator ``module_input`` returns the module's first
        input tensor, and an operator ``module_output`` returns its first output tensor. They are
        analysed, edited and selected like all operators, but other tools do not see them.

        Args:
            module: Patterns, one of which must match the module's path.
            inputs: Whether to show the inputs of modules.
            outputs: Whether to show their outputs.

        Raises:
            SelectionError: `module` is not a pattern or a list of patterns.
        """
        _registered(self).show(module, inputs, outputs)
        self._amanda.changed()

    def depends_on(self, *tools: Tool) -> None:
        """Declare that this tool reads what `tools` write into contexts (paper, section 5.2).

        They are applied with this tool, and their routines run before its own.

        Raises:
            ToolError: One of them is not a tool.
            DependencyCycleError: This tool is applied, and they depend on it.
        """
        for tool in tools:
            check_tool(tool, "depends_on")
        before = list(self._amanda.dependencies)
        self._amanda.dependencies.extend(tools)
        try:
            self._amanda.changed()
        except DependencyCycleError:
            # The tools are applied now, and stay as they were.
            self._amanda.dependencies[:] = before
            raise

    def where(self: T, selection: Selection | None) -> T:
        """Restrict this tool to the ops and steps of a selection; None removes the restriction.

        The tool's analysis routines are not called for other ops, and its actions do not run in
        other steps. Context rules and listeners for steps and scopes serve other tools as well, so
        they are not restricted. Neither are the tools that this one depends on.

        Returns:
            The tool itself, so that ``apply(Tracer().where(select(op="conv*")))`` reads well.

        Raises:
            SelectionError: Something else was given.
        """
        if selection is not None and not isinstance(selection, Selection):
            raise SelectionError(
                f"{selection!r} is not a selection",
                where=f"{self.tool_name}.where",
                fix="Make one with amanda.select(op='conv*')",
            )
        self._amanda.selection = selection
        self._amanda.changed()
        return self

    def invalidate(self) -> None:
        """Drop the actions that this tool's analysis requested, so that analysis runs again.

        A tool with a schedule calls this. Contexts keep what tools wrote into them.
        """
        for store in tuple(self._amanda.stores_with_actions):
            store.log_of(self).clear()
        self._amanda.changed()

    def before_export(self) -> None:
        """Prepare for `amanda.exported`: end a calibration, or raise an error."""

    def check_stage(self, model: Any, facts: Facts) -> None:
        """Refuse a stage of a pipeline that the tool cannot instrument, by an error.

        Each process calls this before its stage sends or receives anything, so that none waits for
        one that refuses.

        Args:
            model: The layers of the stage. Other processes have the others.
            facts: What the driver knows of the processes.
        """

    @property
    def analyses_backward(self) -> bool:
        """True if the tool has an analysis routine for backward ops."""
        return any(r for point, r in self._amanda.routines.items() if point.is_backward)

    @property
    def tool_name(self) -> str:
        """Name in messages: the class, or ``Tool`` with its first routine for a plain instance."""
        routines = [routine for some in self._amanda.routines.values() for routine in some]
        if type(self) is Tool and routines:
            return f"Tool({getattr(routines[0], '__qualname__', repr(routines[0]))})"
        return type(self).__qualname__

    def _check_callable(self, function: object, method: str) -> None:
        if not callable(function):
            raise ToolError(
                f"{function!r} cannot be called",
                where=f"{type(self).__qualname__}.{method}",
                fix="Pass a function or method that takes an OpContext",
            )


def _registered(tool: Tool) -> Registered:
    # Late, as it costs a hundredth of `import amanda`, and few tools need it.
    from amanda_core.engine.calls import registered

    return registered(tool)


def check_tool(tool: object, where: str) -> None:
    """Raise `ToolError` unless `tool` is an instance of `Tool`."""
    if isinstance(tool, Tool):
        return
    fix = "Pass instances of amanda.Tool"
    if isinstance(tool, type) and issubclass(tool, Tool):
        fix = f"Pass an instance: {tool.__name__}()"
    elif isinstance(tool, (list, tuple)):
        fix = f"Pass the tools one by one: {where}(*tools)"
    raise ToolError(f"{tool!r} is not a tool", where=where, fix=fix)


def in_dependency_order(tools: Iterable[Tool]) -> tuple[Tool, ...]:
    """Return the tools and all that they depend on, each once, dependencies first.

    Apart from that, the given order is kept.

    Raises:
        DependencyCycleError: The dependencies form a cycle; the message prints it.
    """
    # By identity: a tool may be a dataclass, with an equality of its own and no hash.
    order: dict[int, Tool] = {}

    def visit(tool: Tool, path: tuple[Tool, ...]) -> None:
        above = [id(dependent) for dependent in path]
        if id(tool) in above:
            circle = (*path[above.index(id(tool)) :], tool)
            raise DependencyCycleError(
                "Tools depend on one another: " + " -> ".join(t.tool_name for t in circle),
                fix="Remove one of these depends_on() calls",
            )
        if id(tool) not in order:
            for dependency in tool._amanda.dependencies:
                visit(dependency, (*path, tool))
            order[id(tool)] = tool

    for tool in tools:
        visit(tool, ())
    return tuple(order.values())
