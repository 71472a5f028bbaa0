"""Configuration: ``[tool.amanda]`` of pyproject.toml, environment variables and flags.

Owns how each source is read. Their precedence is file < environment < flags, and a program's own
call of `amanda.apply` is above all. The engine does not import this package.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from amanda_core.config import document, schema, settings, text
from amanda_core.config.settings import Config, Layer, Selecting, Setting, ToolSettings
from amanda_core.errors import ConfigError
from amanda_core.plugins.installed import BLOCKING, split_names

__all__ = [
    "Config",
    "Layer",
    "Selecting",
    "Setting",
    "ToolSettings",
    "from_environment",
    "from_file",
    "from_flags",
    "layers",
    "load",
]


def layers(
    start: Path,
    flags: Layer,
    *,
    file: Path | None = None,
    use_file: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> tuple[Layer, Layer, Layer]:
    """Return the settings of the file, the environment and the flags.

    Args:
        start: The folder of the program; the nearest pyproject.toml with a table ``[tool.amanda]``
            there or above it is read.
        flags: The layer of the command line.
        file: Read this one instead.
        use_file: Whether to read one at all.
        environment: The environment variables.

    Raises:
        ConfigError: A source is malformed.
    """
    layer = from_file(start, file) if use_file else Layer()
    return layer, from_environment(environment), flags


def load(
    start: Path,
    flags: Layer,
    *,
    file: Path | None = None,
    use_file: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> Config:
    """Return the configuration of a program; see `layers`."""
    found = layers(start, flags, file=file, use_file=use_file, environment=environment)
    return settings.merge(*found)


def from_file(start: Path, file: Path | None = None) -> Layer:
    """Return the layer of `file` or of the nearest pyproject.toml; empty if there is none."""
    found = document.Document(file) if file is not None else document.find(start.resolve())
    return schema.read(found) if found is not None else Layer()


_NO_DRIVER = "Separate names by commas, such as 'a,b'. To attach none, set 'drivers = []' in a file"
_EVERY_PLUGIN = "Separate names by commas, such as 'a,b', or write '*' for all"
#: The variables, in the order of the arguments of `from_flags`.
_VARIABLES = ("AMANDA_TOOLS", "AMANDA_OUTPUT", "AMANDA_DRIVERS", BLOCKING)


def from_environment(environment: Mapping[str, str] = os.environ) -> Layer:
    """Return the layer of the environment variables.

    AMANDA_TOOLS (``prune:sparsity=0.5;trace``), AMANDA_OUTPUT, AMANDA_DRIVERS and
    AMANDA_DISABLE_PLUGINS.
    """
    tools, output, drivers, disabled = (environment.get(name) or None for name in _VARIABLES)
    return from_flags(
        text.split(tools or "", ";", _VARIABLES[0]),
        output,
        drivers,
        disabled=disabled if disabled and split_names(disabled) else None,
        names=_VARIABLES,
    )


def from_flags(
    tools: Sequence[str] = (),
    output: str | None = None,
    drivers: str | None = None,
    select: Selecting | None = None,
    disabled: str | None = None,
    *,
    names: tuple[str, ...] = ("-t", "-o", "--drivers", "--disable-plugins"),
) -> Layer:
    """Return the layer of values given as text.

    Args:
        tools: Each ``[ALIAS=]TOOL[:key=value,...]``.
        output: The folder of results.
        drivers: Names, separated by commas.
        select: The ops and steps to which all tools are restricted.
        disabled: Names of plugins and distributions, separated by commas, or ``*``.
        names: The names of these arguments in messages, except `select`.
    """
    if output is not None and ("\0" in output or not output.strip()):
        raise ConfigError(f"{output[:80]!r} is not a folder", where=names[1])
    return Layer(
        output=Setting(output, names[1]) if output is not None else None,
        drivers=_names(drivers, names[2], "driver, or names one twice", _NO_DRIVER, once=True),
        disabled=_names(disabled, names[3], "plugin", _EVERY_PLUGIN),
        tools=text.parse_tools(tools, names[0]),
        select=select or Selecting(),
    )


def _names(
    given: str | None, where: str, what: str, fix: str, once: bool = False
) -> Setting | None:
    if given is None:
        return None
    names = split_names(given)
    if not names or (once and len(set(names)) < len(names)):
        raise ConfigError(f"{given[:80]!r} does not name a {what}", where=where, fix=fix)
    return Setting(names, where)
