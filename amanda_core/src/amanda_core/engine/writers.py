"""The warning of a function that writes the model while tools change its values.

Owns how it is found out whether a tool does: by what it says, by what its routines have returned,
and before any has run by what their code asks for.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping
from contextlib import suppress
from inspect import CO_VARARGS
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from amanda_core.engine.action import ActionKind

if TYPE_CHECKING:
    from amanda_core.engine.store import Store
    from amanda_core.engine.tool import Tool

__all__ = ["sentence_of_writer"]

_REPLACEMENTS = {kind.value for kind in ActionKind if kind.is_replacement}
_INSERTIONS = {kind.value for kind in ActionKind} - _REPLACEMENTS


def sentence_of_writer(writer: str, tools: tuple[Tool, ...], store: Store) -> str:
    """Return the warning of a function that writes the model; empty if no tool changes values.

    Args:
        writer: What the program calls it.
        tools: The tools that are applied.
        store: That of their session.
    """
    editing = [tool for tool in tools if _changes_values(tool, store)]
    if not editing:
        return ""
    names = ", ".join(tool.tool_name for tool in editing)
    way = "write the values into the model's parameters or its code"
    for tool in editing:
        if hasattr(tool, "saves_to"):
            way = f"call bake(model) of {tool.tool_name}, or give it save=FOLDER under `amanda run`"
            if tool.saves_to is not None:
                way = f"use what is written to {tool.saves_to} at the end"
            break
    return (
        f"{writer} writes the model without the changes of {names}, which exist only while its "
        f"operators run. To keep them, {way}."
    )


def _changes_values(tool: Tool, store: Store) -> bool:
    """Return True if a tool has changed values, or is likely to once it finds an operator."""
    if tool.changes_values is not None:
        return tool.changes_values
    if tool._amanda.returned:
        return True
    log = store.logs.get(tool._amanda, {})
    actions = [a for points in log.values() for some in points.values() for a in some]
    if actions:
        return any(action.kind.is_replacement for action in actions)
    methods = _methods_of(tool)
    routines = [one for some in tool._amanda.routines.values() for one in some]
    called = [function for one in routines for function in _functions(one)]
    codes = {one.__code__ for one in (*called, *methods.values())}
    return any(_asks_to_change(code, methods) for code in codes)


def _methods_of(tool: Tool) -> dict[str, FunctionType]:
    """Return the methods of a tool's class, by their names."""
    from amanda_core.engine.tool import Tool

    kinds = type(tool).__mro__[: type(tool).__mro__.index(Tool)]
    found = {name: one for kind in reversed(kinds) for name, one in vars(kind).items()}
    return {name: one for name, one in found.items() if isinstance(one, FunctionType)}


def _functions(routine: Any) -> Iterator[FunctionType]:
    """Yield the function of a routine, and the functions that it closes over."""
    function = routine.__func__ if isinstance(routine, MethodType) else routine
    if isinstance(function, FunctionType):
        yield function
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # The cell is empty.
                yield from _functions(cell.cell_contents)


def _asks_to_change(code: CodeType, methods: Mapping[str, FunctionType]) -> bool:
    """Return True if code, or code in it, asks for routines that may change values."""
    names, inner = set(code.co_names), [c for c in code.co_consts if type(c) is CodeType]
    if names & _REPLACEMENTS:
        return True
    # The names of keyword arguments are constants of the code.
    observes = any(type(one) is tuple and "observe" in one for one in code.co_consts)
    if names & _INSERTIONS and not observes:
        called = [(one, 0) for one in inner]
        called += [(one.__code__, 1) for name, one in methods.items() if name in names]
        return not called or any(_reads_arguments(one, skipped) for one, skipped in called)
    return any(_asks_to_change(one, methods) for one in inner)


def _reads_arguments(code: CodeType, skipped: int) -> bool:
    """Return True if a routine reads the values that it gets: one that only counts does not."""
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)
    arguments = set(code.co_varnames[skipped:count])
    return any(one.argval in arguments for one in dis.get_instructions(code))
