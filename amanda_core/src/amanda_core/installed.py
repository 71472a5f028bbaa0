"""What installed distributions bring: entry points, whose they are, and which are blocked.

Owns the entry-point groups and the variable that blocks plugins. Imports none of them; metadata
is written by strangers, so nothing in it is trusted to be well formed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import importlib_metadata

from amanda_core.errors import AmandaWarning
from amanda_core.results import printable

__all__ = [
    "BLOCKING",
    "DRIVER_GROUP",
    "PLUGIN_GROUP",
    "TOOL_GROUP",
    "Installed",
    "blocked_names",
    "installed",
    "unreadable",
]

DRIVER_GROUP = "amanda.drivers"
#: Plugins that are not drivers.
PLUGIN_GROUP = "amanda.plugins"
TOOL_GROUP = "amanda.tools"
#: Names of plugins or distributions that are not to be used, with commas between, or ``*``.
BLOCKING = "AMANDA_DISABLE_PLUGINS"
_warned = False


@dataclass(frozen=True, slots=True)
class Installed:
    """An entry point of an installed distribution; nothing of it has been imported.

    Attributes:
        name: Name of the driver, plugin or tool.
        value: ``module:attribute``.
        distribution: Name of the distribution, or an empty string where it is not known.
        version: Its version, or an empty string.
        blocked: Whether the environment forbids its use.
        point: The entry point; ``load()`` imports it.
    """

    name: str
    value: str
    distribution: str
    version: str
    blocked: bool
    point: Any

    @property
    def origin(self) -> str:
        """Name and version of the distribution, for messages."""
        return f"{self.distribution} {self.version}".strip() or "unknown"


def blocked_names() -> frozenset[str]:
    """The names that `BLOCKING` lists."""
    parts = (part.strip() for part in os.environ.get(BLOCKING, "").split(","))
    return frozenset(part for part in parts if part)


def installed(group: str) -> tuple[Installed, ...]:
    """All entry points of a group, blocked ones included, in the order of discovery."""
    names = blocked_names()
    found = []
    for point in _points(group):
        distribution, version = _origin(point)
        blocked = not names.isdisjoint({"*", point.name, distribution} - {""})
        value = str(getattr(point, "value", ""))
        found.append(Installed(point.name, value, distribution, version, blocked, point))
    return tuple(found)


def unreadable() -> tuple[str, ...]:
    """The distributions whose entry points cannot be read, each by name or place, and why."""
    found = []
    for distribution in importlib_metadata.distributions():
        try:
            list(distribution.entry_points)
        except Exception as error:
            found.append(f"{_place(distribution)}: {type(error).__name__}: {error}")
    return tuple(found)


def _points(group: str) -> Iterable[Any]:
    try:
        return importlib_metadata.entry_points(group=group)
    except Exception:
        # One distribution with a damaged entry_points.txt hides those of all others.
        return _of_readable(group)


def _of_readable(group: str) -> list[Any]:
    global _warned
    found: list[Any] = []
    seen: set[str] = set()
    for distribution in importlib_metadata.distributions():
        try:
            name = _place(distribution)
            if name not in seen:  # The first on the path is the one that is imported.
                seen.add(name)
                found += distribution.entry_points.select(group=group)
        except Exception as error:
            if not _warned:
                _warned = True
                warnings.warn(
                    f"Skipped: the entry points of {_place(distribution)} cannot be read "
                    f"({type(error).__name__}: {error}). Reinstall it",
                    AmandaWarning,
                    stacklevel=2,
                )
    return found


def _place(distribution: Any) -> str:
    try:
        name = distribution.name
    except Exception:
        name = None
    return printable(name or getattr(distribution, "_path", "a distribution without a name"))


def _origin(point: Any) -> tuple[str, str]:
    try:
        return printable(point.dist.name), printable(point.dist.version)
    except Exception:  # Whatever a distribution without metadata raises.
        return "", ""
