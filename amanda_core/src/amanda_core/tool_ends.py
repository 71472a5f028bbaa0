"""Calls of the functions that tools registered by `Tool.add_inst_for_end`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from amanda_core.containment import without_exit
from amanda_core.errors import annotate

if TYPE_CHECKING:
    from amanda_core.tool import Tool

__all__ = ["end"]


def end(tools: Iterable[Tool]) -> None:
    """Call the functions that the tools registered for their end.

    Raises:
        BaseException: The error of the first that failed. The others ran nevertheless.
    """
    failure: BaseException | None = None
    for tool in tools:
        for function in tool._amanda.ends:
            try:
                with without_exit(f"Tool {tool.tool_name} failed to end"):
                    function()
            except BaseException as error:
                if failure is None:
                    failure = error
                else:
                    annotate(failure, f"Another tool failed to end: {error!r}")
    if failure is not None:
        raise failure
