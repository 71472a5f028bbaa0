"""The settings as typed values with their origin, and how layers of them merge.

Owns the layers (file, environment, flags) and their precedence. It does not read files or
variables.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from amanda_core.errors import ConfigError

__all__ = ["Config", "Layer", "Selecting", "Setting", "Steps", "ToolSettings", "last", "merge"]

Steps = slice | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """One value as it was written.

    Attributes:
        value: The value; a string if it was written as text.
        where: ``file:line``, the variable or the flag, for messages.
        text: Whether it was written as text, which must be converted to other types.
        base: The folder that a relative path is relative to; None: the current one.
    """

    value: Any
    where: str
    text: bool = False
    base: Path | None = None


@dataclass(frozen=True, slots=True)
class Selecting:
    """The arguments of `amanda_core.engine.selection.select`; None for those not given.

    Attributes:
        ops: Patterns of operators.
        modules: Patterns of modules.
        namespace: Where the operators run.
        steps: A range of steps, or a list of them.
        calls: The same for calls of the outermost module.
        where: The source, for messages.
        origins: Name of an argument -> its source, if several sources were merged.
    """

    ops: tuple[str, ...] | None = None
    modules: tuple[str, ...] | None = None
    namespace: str | None = None
    steps: Steps | None = None
    calls: Steps | None = None
    where: str = ""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def over(self, lower: Selecting) -> Selecting:
        """Return a copy with the unset fields taken from `lower`."""
        said = {**lower.said(), **self.said()}
        return Selecting(
            **{name: value for name, (value, _) in said.items()},
            where=self.where or lower.where,
            origins={name: where for name, (_, where) in said.items()},
        )

    def said(self) -> dict[str, tuple[Any, str]]:
        """Return the given arguments by name, each with its value and its source."""
        return {
            name: (value, self.origins.get(name, self.where))
            for name in ("ops", "modules", "namespace", "steps", "calls")
            if (value := getattr(self, name)) is not None
        }

    def __bool__(self) -> bool:
        return bool(self.said())


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """A tool under the name that its results get.

    Attributes:
        name: That name; the key in the file.
        tool: The installed tool, or ``module:Class`` or ``file.py:Class`` from a flag; None for the
            one called `name`, or as a lower layer has it.
        options: Its options as written.
        enable: Whether it runs if no source names the tools to run.
        select: The ops and steps to which it is restricted.
        where: Where it was named first.
    """

    name: str
    where: str
    tool: str | None = None
    options: Mapping[str, Setting] = field(default_factory=dict)
    enable: bool | None = None
    select: Selecting = Selecting()

    @property
    def reference(self) -> str:
        """The name by which the tool is found."""
        return self.tool or self.name

    def over(self, lower: ToolSettings) -> ToolSettings:
        """Return a copy with the unset fields taken from `lower`."""
        if self.tool is not None and self.tool != lower.reference:
            return self  # The lower layer has another tool of this name, with other options.
        return ToolSettings(
            self.name,
            self.where,
            lower.tool,
            {**lower.options, **self.options},
            lower.enable if self.enable is None else self.enable,
            self.select.over(lower.select),
        )


@dataclass(frozen=True, slots=True)
class Layer:
    """The settings of one source; None or empty for those it does not have.

    Attributes:
        output: The folder of results.
        drivers: Names of the drivers that may attach.
        tools: The tools, by the names that their results get.
        select: The ops and steps to which all tools are restricted.
        disabled: Names of the blocked plugins and distributions.
        path: The file, if the source is one.
    """

    output: Setting | None = None
    drivers: Setting | None = None
    tools: Mapping[str, ToolSettings] = field(default_factory=dict)
    select: Selecting = Selecting()
    disabled: Setting | None = None
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """The merged configuration.

    Attributes:
        tools: The tools to run, in the order of the source that named them.
        output: Absolute path of the folder of results; None if no source names one.
        output_is_shared: Whether a file names it, for all runs and not for one.
        drivers: Names of the drivers that may attach; empty for none of them, None for all.
        where: Where the drivers were named.
        disabled: The blocked plugins and distributions of each source.
    """

    tools: tuple[ToolSettings, ...] = ()
    output: Path | None = None
    output_is_shared: bool = False
    drivers: tuple[str, ...] | None = None
    where: str = ""
    disabled: tuple[Setting, ...] = ()


def merge(file: Layer, environment: Layer, flags: Layer) -> Config:
    """Merge the layers: file < environment < flags, key by key.

    The highest layer that names tools decides which tools run. Options and selections that it does
    not give come from lower layers. In the file, a tool's own selection overrides the one for all
    tools; that of the flags overrides both. A plugin that any layer disables is disabled.
    """
    layers = (file, environment, flags)
    tools: dict[str, ToolSettings] = {}
    for layer in layers:
        for name, settings in layer.tools.items():
            tools[name] = settings.over(tools[name]) if name in tools else settings
    named = (
        flags.tools or environment.tools or [n for n, t in tools.items() if t.enable is not False]
    )
    chosen = [tools[name] for name in named]
    chosen = [
        replace(s, select=flags.select.over(environment.select.over(s.select.over(file.select))))
        for s in chosen
    ]
    _check_names(chosen)
    output = last(layer.output for layer in layers)
    drivers = last(layer.drivers for layer in layers)
    return Config(
        tuple(chosen),
        # Not Path.expanduser, which raises for a user who does not exist.
        (output.base or Path.cwd()) / os.path.expanduser(output.value) if output else None,
        output is not None and output is file.output,
        tuple(drivers.value) if drivers else None,
        drivers.where if drivers else "",
        tuple(layer.disabled for layer in layers if layer.disabled is not None),
    )


def last(settings: Iterable[Setting | None]) -> Setting | None:
    """Return the setting of the highest layer that has one."""
    return next((setting for setting in reversed([*settings]) if setting is not None), None)


def _check_names(tools: Sequence[ToolSettings]) -> None:
    # Each name becomes a file name, and some file systems ignore case.
    seen: dict[str, ToolSettings] = {}
    for settings in tools:
        other = seen.setdefault(settings.name.casefold(), settings)
        if other is not settings:
            raise ConfigError(
                f"The names {other.name!r} and {settings.name!r} differ only in case",
                where=settings.where,
                fix="Their results would be one file: rename one",
            )
