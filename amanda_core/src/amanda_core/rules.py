"""Rules: functions of a tool that run around the analysis routines of the other applied tools.

Owns their order. `Tool.add_context_rule` registers them, and `Session` runs the routines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amanda_core.action import IPoint
    from amanda_core.context import OpContext
    from amanda_core.session import Session
    from amanda_core.tool import Tool

__all__ = ["analyse"]


def analyse(session: Session, context: OpContext, i_point: IPoint, due: Sequence[Tool]) -> None:
    """Run the rules of the applied tools, and between them the routines of the tools that are due.

    Raises:
        BaseException: Whatever a rule or routine raised, with a note.
    """
    registered = [tool._amanda for tool in due]
    for tool in session.tools:
        for rule in tool._amanda.before_rules:
            session._call(rule, tool, context, i_point)
        if tool._amanda in registered:
            session._record(tool, context, i_point)
    try:
        for tool in reversed(session.tools):
            for rule in tool._amanda.after_rules:
                session._call(rule, tool, context, i_point)
    except BaseException:
        # The rules belong to the analysis of all tools, so none of it is cached.
        for tool in due:
            session._store.log_of(tool).get(context._key, {}).pop(i_point, None)
        raise
