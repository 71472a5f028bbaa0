"""The entry points of installed distributions.

Owns the entry-point groups and which plugins are blocked. Plugins are not imported. Their metadata
is not trusted to be well formed: one damaged distribution does not hide the others.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import importlib_metadata

from amanda_core.runtime.containment import contain, described
from amanda_core.runtime.terminal import printable
from amanda_core.runtime.warning_locations import warn

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
    "distribution_names",
    "entry_points",
    "installed",
    "split_names",
    "unreadable",
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

#: Whether somebody was told of a damaged distribution.
_warned = False


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


def installed(group: str, points: Any = None) -> tuple[Installed, ...]:
    """Return all entry points of a group, blocked ones included, in the order of discovery.

    Args:
        group: The group.
        points: What `entry_points` returned, for callers that look for several groups: it reads a
            file of every installed distribution.
    """
    blocking = {canonical(name): where for name, where in blocked_names().items()}
    found = []
    #: Distribution of an entry point -> its name and version: each reading reads its metadata.
    origins: dict[int, tuple[str, str]] = {}
    for point in (entry_points() if points is None else points).select(group=group):
        key = id(getattr(point, "dist", point))
        if key not in origins:
            origins[key] = _origin(point)
        distribution, version = origins[key]
        names = ["*", *(canonical(name) for name in (point.name, distribution) if name)]
        blocker = next((blocking[name] for name in names if name in blocking), "")
        value = str(getattr(point, "value", ""))
        found.append(Installed(point.name, value, distribution, version, blocker, point))
    return tuple(found)


def distribution_names() -> frozenset[str]:
    """Return the canonical names of all installed distributions whose name can be read."""
    found = set()
    for distribution in importlib_metadata.distributions():
        try:
            found.add(canonical(distribution.name))
        except BaseException as error:  # The name may be None, or damaged metadata raises.
            contain(error)
    return frozenset(found)


def unreadable() -> tuple[str, ...]:
    """Return descriptions of the distributions whose entry points cannot be read."""
    found = []
    for distribution in importlib_metadata.distributions():
        try:
            list(distribution.entry_points)
        except BaseException as error:
            contain(error)
            found.append(f"{_place(distribution)}: {described(error)}")
    return tuple(found)


def entry_points() -> Any:
    """Return the entry points of all distributions, of which ``select(group=...)`` chooses some."""
    try:
        return importlib_metadata.entry_points()
    except BaseException as error:
        contain(error)
        # One distribution with a damaged entry_points.txt hides those of all others.
        return importlib_metadata.EntryPoints(_readable_points())


def _origin(point: Any) -> tuple[str, str]:
    try:
        name, version = _named(point.dist)
        return printable(name), printable(version)
    except BaseException as error:  # Whatever a distribution without metadata raises.
        contain(error)
        return "", ""


def _named(distribution: Any) -> tuple[str, str]:
    """Return the name and version of a distribution.

    They are two of the first lines of a file. ``distribution.name`` parses all of it as a message,
    which takes longer than everything else that is read of distributions.
    """
    if type(distribution) is importlib_metadata.PathDistribution:
        head = (distribution.read_text("METADATA") or "").partition("\n\n")[0]
        pairs = [line.partition(": ")[::2] for line in head.splitlines()]
        if [key for key, _ in pairs if key in ("Name", "Version")] in _ONE_OF_EACH:
            found = dict(pairs)
            return found["Name"].strip(), found["Version"].strip()
    return distribution.name, distribution.version


#: The orders of the two lines, each of which is there once.
_ONE_OF_EACH = ["Name", "Version"], ["Version", "Name"]


def _readable_points() -> list[Any]:
    """Return the entry points that can be read; warn of the first distribution that cannot."""
    global _warned
    found: list[Any] = []
    seen: set[str] = set()
    for distribution in importlib_metadata.distributions():
        try:
            name = _place(distribution)
            if name not in seen:  # The first on the path is the one that is imported.
                seen.add(name)
                found += distribution.entry_points
        except BaseException as error:
            contain(error)
            if not _warned:
                _warned = True
                warn(
                    f"Skipped: the entry points of {_place(distribution)} cannot be read "
                    f"({described(error)}). Reinstall it",
                    importing=True,
                )
    return found


def _place(distribution: Any) -> str:
    try:
        name = distribution.name
    except BaseException as error:
        contain(error)
        name = None
    return printable(name or getattr(distribution, "_path", "a distribution without a name"))
