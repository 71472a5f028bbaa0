"""The entry points of installed distributions.

Owns the entry-point groups and which plugins are blocked. Plugins are not imported. Their metadata
is not trusted to be well formed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import importlib_metadata

from amanda_core.containment import contain
from amanda_core.terminal import printable

__all__ = [
    "BLOCKING",
    "COMMAND_GROUP",
    "DRIVER_GROUP",
    "PLUGIN_GROUP",
    "TOOL_GROUP",
    "Installed",
    "blocked",
    "blocked_names",
    "canonical",
    "installed",
    "split_names",
]

DRIVER_GROUP = "amanda.drivers"
#: Plugins that are not drivers.
PLUGIN_GROUP = "amanda.plugins"
TOOL_GROUP = "amanda.tools"
#: Commands of the program `amanda`.
COMMAND_GROUP = "amanda.commands"
#: Environment variable with the blocked plugins or distributions, separated by commas, or ``*``.
BLOCKING = "AMANDA_DISABLE_PLUGINS"
#: Names blocked in this process -> the flag, or the line of a configuration, that blocks them.
blocked: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Installed:
    """An entry point of an installed distribution, which has not been imported.

    Attributes:
        name: Name of the driver, plugin, tool or command.
        value: ``module:attribute``.
        distribution: Name of the distribution, or an empty string if unknown.
        version: Its version, or an empty string.
        blocked: What blocks it: a variable, a flag, or the line of a file; else empty.
        point: The entry point; ``load()`` imports it.
    """

    name: str
    value: str
    distribution: str
    version: str
    blocked: str
    point: Any

    @property
    def origin(self) -> str:
        """Name and version of the distribution, for messages."""
        return f"{self.distribution} {self.version}".strip() or "unknown"


def canonical(name: str) -> str:
    """Return the normalised form of a distribution's name (PEP 503).

    >>> canonical("Amanda_Tools")
    'amanda-tools'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def split_names(text: str) -> tuple[str, ...]:
    """Return the names in a text that are separated by commas."""
    return tuple(part for part in (part.strip() for part in text.split(",")) if part)


def blocked_names() -> dict[str, str]:
    """Return each blocked name, and what blocks it."""
    return dict.fromkeys(split_names(os.environ.get(BLOCKING, "")), BLOCKING) | blocked


def installed(group: str) -> tuple[Installed, ...]:
    """Return all entry points of a group, blocked ones included, in the order of discovery."""
    blocking = {canonical(name): where for name, where in blocked_names().items()}
    found = []
    for point in _points(group):
        distribution, version = _origin(point)
        names = ["*", *(canonical(name) for name in (point.name, distribution) if name)]
        blocker = next((blocking[name] for name in names if name in blocking), "")
        value = str(getattr(point, "value", ""))
        found.append(Installed(point.name, value, distribution, version, blocker, point))
    return tuple(found)


def _points(group: str) -> Iterable[Any]:
    try:
        return importlib_metadata.entry_points(group=group)
    except BaseException as error:
        contain(error)
        # One distribution with a damaged entry_points.txt hides those of all others.
        from amanda_core.damaged_metadata import readable_points

        return readable_points(group)


def _origin(point: Any) -> tuple[str, str]:
    try:
        return printable(point.dist.name), printable(point.dist.version)
    except BaseException as error:  # Whatever a distribution without metadata raises.
        contain(error)
        return "", ""
