"""`Tool`: what a person writes. Registration of routines, dependencies and invalidation.

Owns a tool's own state and the dependency order; knows nothing of sessions but that somebody
wants to hear of changes. The methods' names and signatures are the paper's (listing 2).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from amanda_core.action import IPoint
from amanda_core.errors import DependencyCycleError, SelectionError, ToolError

if TYPE_CHECKING:
    from amanda_core.calls import Call
    from amanda_core.context import OpContext
    from amanda_core.selection import Patterns, Selection

__all__ = ["Tool", "in_dependency_order"]

Analysis = Callable[["OpContext"], None]
StepListener = Callable[[int], None]
ScopeListener = Callable[[str], None]
CallListener = Callable[["Call"], None] | None
T = TypeVar("T", bound="Tool")


_COPIED = (
    *("routines", "before_rules", "after_rules", "step", "scope", "modules"),
    *("dependencies", "selection"),
)


class _Registrations:
    """What one tool registered, and the memory of the sessions that it took part in."""

    _serials = itertools.count()

    def __init__(self) -> None:
        #: Tells tools apart for good, which addresses do not.
        self.serial = next(self._serials)
        #: Counts the changes after which no plan made with this tool holds any more.
        self.generation = 0
        self.routines: dict[IPoint, list[Analysis]] = {point: [] for point in IPoint}
        #: Whether one of them was ever called.
        self.analysed = False
        self.before_rules: list[Analysis] = []
        self.after_rules: list[Analysis] = []
        self.step: list[tuple[StepListener | None, StepListener | None]] = []
        self.scope: list[tuple[ScopeListener | None, ScopeListener | None]] = []
        #: What `calls` keeps for this tool; None where calls of modules do not matter to it.
        self.modules: Any = None
        self.dependencies: list[Tool] = []
        #: The ops and steps that the tool is for; None for all.
        self.selection: Selection | None = None
        #: Called when the registrations change or the tool is invalidated.
        self.listeners: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Store -> {(op id, point): actions}. Kept here so that a tool's actions, which refer to
        #: the tool, die with it; the stores are keyed weakly.
        self.logs: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
        #: Tools of one `apply` (by identity) -> the store to resume. Held by the newest of them.
        self.stores: dict[tuple[int, ...], Any] = {}

    @property
    def watches_modules(self) -> bool:
        """Whether the calls of outermost modules, or values of modules, matter to the tool."""
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

    #: Whether what it inserts comes first before an op and last behind it, around that of others.
    #: For tools that have to see the values as the program has them; set by the class.
    outermost: ClassVar[bool] = False
    _amanda: _Registrations

    def __new__(cls, *args: Any, **kwargs: Any) -> Tool:  # noqa: D102  Not for calling.
        # Here and not in __init__, so that a subclass need not call super().__init__().
        self = super().__new__(cls)
        self._amanda = _Registrations()
        return self

    def add_inst_for_op(
        self, callback: Analysis, backward: bool = False, require_outputs: bool = False
    ) -> None:
        """Register an analysis routine for every op (paper, listing 2).

        Args:
            callback: Called with the op's context, once per op and session.
            backward: For the ops of the backward program instead of the forward one.
            require_outputs: After the op has run instead of before it.

        Raises:
            ToolError: `callback` cannot be called.
        """
        self._check_callable(callback, "add_inst_for_op")
        point = IPoint.of(backward, require_outputs)
        self._amanda.routines[point].append(callback)
        # Ops analysed at this point before have not met the new routine.
        for log in self._amanda.logs.values():
            for key in [key for key in log if key[1] is point]:
                del log[key]
        self._amanda.changed()

    def add_context_rule(
        self, before: Analysis | None = None, after: Analysis | None = None
    ) -> None:
        """Register functions that transform contexts around the analysis of other tools.

        They run at each point at which some applied tool analyses (at all points if none does):
        `before` in tool order ahead of the dependents' routines, `after` in reverse tool order
        behind all routines. The paper's mapping tool is made of these.
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

        Each gets the number of the step, from 0. What ends a step is the backend's to say: an
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

    def add_inst_for_call(self, begin: CallListener = None, end: CallListener = None) -> None:
        """Register functions for the begin and end of each call of an outermost module.

        Each gets the `amanda_core.calls.Call`. In a decoding loop, such as that of ``generate``,
        the first call of a step processes the prompt, and each further one the next tokens.
        """
        from amanda_core.calls import registered

        registered(self).listeners.append((begin, end))
        self._amanda.changed()

    def show_modules(
        self, module: Patterns, *, inputs: bool = False, outputs: bool = False
    ) -> None:
        """Give this tool operators for what modules take and return.

        In each call of a chosen module an operator ``module_input`` returns the first tensor that
        the module was given, and ``module_output`` the first that it returns. Other tools do not
        see them. Their analysis, their edits and their selection are those of all operators.

        Args:
            module: Patterns of which one is to match the module's path.
            inputs: Whether to show what the modules take.
            outputs: Whether to show what they return.

        Raises:
            SelectionError: `module` is not a pattern or a list of patterns.
        """
        from amanda_core.calls import registered

        registered(self).show(module, inputs, outputs)
        self._amanda.changed()

    def depends_on(self, *tools: Tool) -> None:
        """Declare that this tool consumes what `tools` put into contexts (paper, section 5.2).

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
            # Found while applied: the tools stay as they were.
            self._amanda.dependencies[:] = before
            raise

    def where(self: T, selection: Selection | None) -> T:
        """Restrict this tool to the ops and steps of a selection; None lifts the restriction.

        The tool's analysis routines are not called for other ops, and what it asked for does not
        happen in other steps. Rules of contexts, and listeners for steps and scopes, serve other
        tools as well and are not restricted; nor are the tools that this one depends on.

        Returns:
            The tool itself, so that ``apply(Tracer().where(select(op="conv*")))`` reads well.

        Raises:
            SelectionError: Something else was given.
        """
        from amanda_core.selection import Selection

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
        """Forget what this tool's analysis asked for, so that it runs again (schedules).

        Contexts and what tools wrote into them stay.
        """
        self._amanda.logs.clear()
        self._amanda.changed()

    @property
    def analyses_backward(self) -> bool:
        """Whether some routine of this tool is for backward ops."""
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

    Otherwise the given order is kept.

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
