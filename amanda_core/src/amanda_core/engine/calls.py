"""Calls of outermost modules, such as the steps of a decoding loop, and the values of modules.

Owns the count of calls, the description of a call, and the two operators that stand for the inputs
and outputs of a module. A session has it only if an applied tool requests calls or values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amanda_core.engine.selection import Pattern, Patterns, listed, matcher
from amanda_core.errors import SelectionError

if TYPE_CHECKING:
    from amanda_core.engine.context import OpContext
    from amanda_core.engine.session import Session
    from amanda_core.engine.tool import Tool
    from amanda_core.interface.facts import Facts

__all__ = ["MODULE_INPUT", "MODULE_OUTPUT", "MODULE_VALUES", "Call", "Calls", "registered"]

#: Types of the operators that a driver adds for `Tool.show_modules`. Each returns its one input.
MODULE_INPUT, MODULE_OUTPUT = "module_input", "module_output"
MODULE_VALUES = frozenset({MODULE_INPUT, MODULE_OUTPUT})

Listener = Callable[["Call"], None] | None


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of an outermost module. Its arguments must not be kept once it has ended.

    Attributes:
        namespace: ``framework/version/mode``.
        module: Name of the module: its class, with a number if several of one class are called.
        number: How many calls of this module the step had before this one.
        args: The positional arguments.
        kwargs: The arguments by name.
        facts: The driver's facts about tensors; None if it has none.
        held: Returns the paths of the modules inside it, whether or not they are called; none where
            the driver does not tell.
    """

    namespace: str
    module: str
    number: int
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    facts: Facts | None
    held: Callable[[], Iterable[str]] = tuple


class Registered:
    """The listeners for calls and the patterns of modules that one tool registered.

    Attributes:
        listeners: Functions for the begin and the end of a call.
        needed: Whether the tool cannot do without any of these calls.
        shown: Patterns of modules, and the types of the operators that are shown for them.
    """

    def __init__(self) -> None:
        self.listeners: list[tuple[Listener, Listener]] = []
        self.needed = False
        self.shown: list[tuple[tuple[Pattern, ...], frozenset[str]]] = []

    def show(self, module: Patterns, inputs: bool, outputs: bool) -> None:
        """Show the tool operators for the inputs or outputs of the modules that match."""
        wanted = [(inputs, MODULE_INPUT), (outputs, MODULE_OUTPUT)]
        types = frozenset(op_type for chosen, op_type in wanted if chosen)
        self.shown.append((listed("module", module), types))

    def is_shown(self, op_type: str, path: str) -> bool:
        """Return True if the tool requested an operator of `op_type` for a module."""
        return any(op_type in types and matcher(given)(path) for given, types in self.shown)


def registered(tool: Tool) -> Registered:
    """Return what a tool registered, so that more can be added."""
    if tool._amanda.modules is None:
        tool._amanda.modules = Registered()
    found: Registered = tool._amanda.modules
    return found


_NOTHING = Registered()


def _asked(tool: Tool) -> Registered:
    return tool._amanda.modules or _NOTHING


class Calls:
    """The calls and values of modules in one session.

    Args:
        session: The session.

    """

    def __init__(self, session: Session) -> None:
        self._session = session
        #: Outermost module -> how often it was called in the current step.
        self._counts: dict[str, int] = {}
        self._step = 0
        self._running: Call | None = None
        #: Type of an operator and path of a module -> whether some tool is shown it.
        self._shown: dict[tuple[str, str], bool] = {}

    # For drivers.

    def enter(
        self,
        namespace: str,
        module: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        held: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """Count a call of an outermost module, and notify the tools that it begins.

        Args:
            namespace: Where its operators run.
            module: The module's name, the same in every call of it.
            args: Its positional arguments.
            kwargs: Its arguments by name.
            held: Returns the paths of the modules inside it.
        """
        session = self._session
        if not session.enabled:
            return
        if self._step != session._step:
            self._step = session._step
            self._counts.clear()
        session.call = self._counts.get(module, 0)
        self._counts[module] = session.call + 1
        session._update_stage()
        facts = session.facts(namespace)
        self._running = Call(namespace, module, session.call, args, kwargs, facts, held)
        session._notify(lambda tool: [begin for begin, _ in _asked(tool).listeners], self._running)

    def leave(self) -> None:
        """Notify the tools that the call of the outermost module has ended."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            self._session._notify(lambda tool: [end for _, end in _asked(tool).listeners], running)
        finally:
            self._session.call = None
            self._session._update_stage()

    def shows(self, op_type: str, path: str) -> bool:
        """Return True if an applied tool is shown the inputs or outputs of the module at `path`.

        Args:
            op_type: `MODULE_INPUT` or `MODULE_OUTPUT`.
            path: The module's path.
        """
        key = (op_type, path)
        known = self._shown.get(key)
        if known is None:
            tools = self._session.tools
            known = self._shown[key] = any(_asked(tool).is_shown(*key) for tool in tools)
        return known

    # For the session.

    def refresh(self) -> None:
        """Update after the tools or their registrations have changed.

        Raises:
            SelectionError: A tool selects backward ops by calls.
        """
        session = self._session
        self._shown.clear()
        by_call = [tool for tool in session.tools if _is_by_call(tool)]
        session.watches_calls = bool(by_call or any(_asked(t).listeners for t in session.tools))
        session.needs_calls = bool(by_call or any(_asked(t).needed for t in session.tools))
        session.watches_values = any(_asked(tool).shown for tool in session.tools)
        session.watches_scopes |= session.watches_values
        for tool in by_call:
            if tool.analyses_backward:
                raise SelectionError(
                    "Backward ops cannot be selected by calls: they run outside of all calls",
                    where=f"tool {tool.tool_name}, {tool._amanda.selection}",
                    fix="Request actions on gradients in a forward analysis routine",
                )

    def may_select(self, tool: Tool, context: OpContext) -> bool:
        """Return True unless the operator of `context` is only shown to other tools."""
        # Without a property or another function: each new op asks for each tool, twice.
        op_type, selection = context._site.op_type, tool._amanda.selection
        if op_type in MODULE_VALUES:
            return _asked(tool).is_shown(op_type, context.module_path)
        by_call = selection is not None and selection.by_call
        if by_call and not self._session.can("calls", context.namespace):
            self._session.warn_once(
                f"{selection} of tool {tool.tool_name} selects nothing in "
                f"{context.namespace}: its driver does not report calls of modules there."
            )
        return True


def _is_by_call(tool: Tool) -> bool:
    return tool._amanda.selection is not None and tool._amanda.selection.by_call
