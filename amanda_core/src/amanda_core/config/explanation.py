"""The output of ``amanda run --show-config``: the settings in force and their sources.

Owns how a setting is shown. Tools are not imported, so options are shown as they were written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from amanda_core.config.settings import Layer, ToolSettings, last, merge

__all__ = ["explain"]

Row = tuple[str, str, str]
_DEFAULT = "default"


def explain(file: Layer, environment: Layer, flags: Layer, output: str) -> list[Row]:
    """Return the settings in force, each with its value and its source.

    Args:
        file: The layer of the file.
        environment: The layer of the environment.
        flags: The layer of the command line.
        output: The default folder of results.
    """
    config = merge(file, environment, flags)
    layers = (file, environment, flags)
    named = last(layer.output for layer in layers)
    rows: list[Row] = [
        ("output", str(config.output), named.where) if named else ("output", output, _DEFAULT),
        ("drivers", "all", _DEFAULT)
        if config.drivers is None
        else ("drivers", ", ".join(config.drivers) or "none", config.where),
    ]
    rows += [("disable_plugins", ", ".join(one.value), one.where) for one in config.disabled]
    for tool in config.tools:
        rows += _tool(tool)
    running = {tool.name for tool in config.tools}
    idle = {name: tool for layer in layers for name, tool in layer.tools.items()}
    rows += [
        (f"tools.{name}", f"{tool.reference} (does not run)", tool.where)
        for name, tool in idle.items()
        if name not in running
    ]
    return rows


def _tool(tool: ToolSettings) -> Iterator[Row]:
    yield f"tools.{tool.name}", tool.reference, tool.where
    for name, setting in tool.options.items():
        yield f"tools.{tool.name}.{name}", _shown(setting.value), setting.where
    for name, (value, where) in tool.select.said().items():
        yield f"tools.{tool.name}.select.{name}", _shown(value), where


def _shown(value: Any) -> str:
    if isinstance(value, slice):
        parts = [value.start, value.stop, *([value.step] if value.step is not None else [])]
        return ":".join("" if part is None else str(part) for part in parts)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value))
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
