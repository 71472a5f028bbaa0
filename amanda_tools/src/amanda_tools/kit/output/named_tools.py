"""Tools by name, as on the command line, for callbacks and notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from amanda_core.config.factories import make
from amanda_core.config.text import parse_tool
from amanda_core.engine.tool import Tool
from amanda_core.errors import ConfigError
from amanda_core.results import HasResult, Result, share

__all__ = ["named_tools", "results_of"]


def named_tools(tools: Sequence[Tool | str], where: str) -> dict[str, Tool]:
    """Return tools by name; a text such as ``flops`` or ``latency:warmup=2`` makes one.

    Args:
        tools: The tools.
        where: What named them, for errors.

    Raises:
        ConfigError: No tool was given, or two have one name.
    """
    found: dict[str, Tool] = {}
    for tool in tools:
        if isinstance(tool, str):
            settings = parse_tool(tool, where)
            name, made = settings.name, make(settings)
        else:
            name, made = type(tool).__name__, tool
        if name in found:
            fix = "Give one another name, as in other=flops"
            raise ConfigError(f"Two tools are called {name!r}", where=where, fix=fix)
        found[name] = made
    if not found:
        raise ConfigError("No tool was given", where=where, fix="`amanda tools` lists them")
    return found


def results_of(tools: dict[str, Tool]) -> dict[str, Result]:
    """Return the results of the tools that have one, which know one another's figures."""
    results = {name: tool.result() for name, tool in tools.items() if isinstance(tool, HasResult)}
    share(results)
    return results
