"""What installed distributions bring: entry points, whose they are, and which are blocked.

Owns the two entry-point groups and the variable that blocks plugins. Imports none of them; metadata
is written by strangers, so nothing in it is trusted to be well formed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import importlib_metadata

__all__ = ["BLOCKING", "DRIVER_GROUP", "TOOL_GROUP", "Installed", "blocked_names", "installed"]

DRIVER_GROUP = "amanda.drivers"
TOOL_GROUP = "amanda.tools"
#: Names of plugins or distributions that are not to be used, with commas between, or ``*``.
BLOCKING = "AMANDA_DISABLE_PLUGINS"


@dataclass(frozen=True, slots=True)
class Installed:
    """An entry point of an installed distribution; nothing of it has been imported.

    Attributes:
        name: Name of the driver or tool.
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
    for point in importlib_metadata.entry_points(group=group):
        distribution, version = _origin(point)
        blocked = not names.isdisjoint({"*", point.name, distribution} - {""})
        value = str(getattr(point, "value", ""))
        found.append(Installed(point.name, value, distribution, version, blocked, point))
    return tuple(found)


def _origin(point: Any) -> tuple[str, str]:
    try:
        return str(point.dist.name), str(point.dist.version)
    except Exception:  # Whatever a distribution without metadata raises.
        return "", ""
