"""Configuration: ``[tool.amanda]`` of pyproject.toml, environment variables and flags.

Owns where each comes from; precedence is file < environment < flags, and what a program says
itself (`amanda.apply`) comes on top. Stands beside the engine, which does not import it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from amanda_core.config import document, schema, settings, text
from amanda_core.config.settings import Config, Layer, Selecting, Setting, ToolSettings
from amanda_core.errors import ConfigError

__all__ = [
    "Config",
    "Layer",
    "Selecting",
    "Setting",
    "ToolSettings",
    "from_environment",
    "from_file",
    "from_flags",
    "load",
]


def load(
    start: Path,
    flags: Layer,
    *,
    file: Path | None = None,
    use_file: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> Config:
    """The configuration that holds for a program.

    Args:
        start: The folder of the program; the nearest pyproject.toml with a table ``[tool.amanda]``
            there or above it is read.
        flags: What the command line says.
        file: Read this one instead.
        use_file: Whether to read one at all.
        environment: The environment variables.

    Raises:
        ConfigError: Some source is malformed.
    """
    layer = from_file(start, file) if use_file else Layer()
    return settings.merge(layer, from_environment(environment), flags)


def from_file(start: Path, file: Path | None = None) -> Layer:
    """The layer of `file`, or of the nearest pyproject.toml; empty where there is none."""
    found = document.Document(file) if file is not None else document.find(start.resolve())
    return schema.read(found) if found is not None else Layer()


def from_environment(environment: Mapping[str, str] = os.environ) -> Layer:
    """The layer of AMANDA_TOOLS (``prune:sparsity=0.5;trace``), AMANDA_OUTPUT, AMANDA_DRIVERS."""
    tools = environment.get("AMANDA_TOOLS", "")
    return from_flags(
        text.split(tools, ";", "AMANDA_TOOLS"),
        environment.get("AMANDA_OUTPUT") or None,
        environment.get("AMANDA_DRIVERS") or None,
        names=("AMANDA_TOOLS", "AMANDA_OUTPUT", "AMANDA_DRIVERS"),
    )


def from_flags(
    tools: Sequence[str] = (),
    output: str | None = None,
    drivers: str | None = None,
    select: Selecting | None = None,
    *,
    names: tuple[str, str, str] = ("-t", "-o", "--drivers"),
) -> Layer:
    """The layer of values given as text.

    Args:
        tools: Each ``[ALIAS=]TOOL[:key=value,...]``.
        output: The folder of results.
        drivers: Names with commas between.
        select: The ops and steps that all tools are for.
        names: What the first three are called in messages.
    """
    if output is not None and ("\0" in output or not output.strip()):
        raise ConfigError(f"{output[:80]!r} is no folder", where=names[1])
    wanted = None
    if drivers is not None:
        wanted = tuple(part.strip() for part in drivers.split(",") if part.strip())
        if not wanted or len(set(wanted)) < len(wanted):
            raise ConfigError(
                f"{drivers[:80]!r} names no driver, or one twice",
                where=names[2],
                fix="Write names with commas between, such as 'a,b'",
            )
    return Layer(
        Setting(output, names[1]) if output is not None else None,
        Setting(wanted, names[2]) if wanted is not None else None,
        text.parse_tools(tools, names[0]),
        select or Selecting(),
    )
