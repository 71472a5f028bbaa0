"""The warning of a function that writes the model while tools change its values.

Owns how it is found out whether a tool does: by what it says, by what its routines have returned,
and before any has run by what their code asks for.
"""

from __future__ import annotations

from inspect import getmembers, isfunction
from typing import TYPE_CHECKING

from amanda_core.engine.action import ActionKind
from amanda_core.engine.tool import Tool
from amanda_core.runtime.code_calls import Calls, functions_in

if TYPE_CHECKING:
    from amanda_core.engine.store import Store

__all__ = ["changes_values", "sentence_of_writer"]

_REPLACEMENTS = {kind.value for kind in ActionKind if kind.is_replacement}
_INSERTIONS = {kind.value for kind in ActionKind} - _REPLACEMENTS


def sentence_of_writer(writer: str, tools: tuple[Tool, ...], store: Store) -> str:
    """Return the warning of a function that writes the model; empty if no tool changes values.

    Args:
        writer: What the program calls it.
        tools: The tools that are applied.
        store: That of their session.
    """
    editing = [tool for tool in tools if changes_values(tool, store)]
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


def changes_values(tool: Tool, store: Store) -> bool:
    """Return True if a tool has changed values, or is likely to once it finds an operator."""
    if tool.changes_values is not None:
        return tool.changes_values
    if tool._amanda.returned:
        return True
    log = store.logs.get(tool._amanda, {})
    actions = [a for points in log.values() for some in points.values() for a in some]
    if actions:
        return any(action.kind.is_replacement for action in actions)
    methods = {
        name: one for name, one in getmembers(type(tool), isfunction) if not hasattr(Tool, name)
    }
    routines = [one for some in tool._amanda.routines.values() for one in some]
    functions = [one for routine in routines for one in functions_in(routine)]
    calls = Calls(_REPLACEMENTS, _INSERTIONS, "observe", methods)
    return any(calls.may_edit(one.__code__) for one in (*functions, *methods.values()))
