"""Reading entry points although some distributions have damaged metadata.

Owns the loop over all installed distributions, in which one damaged distribution does not hide the
others.
"""

from __future__ import annotations

from typing import Any

import importlib_metadata

from amanda_core.containment import contain, described
from amanda_core.installed import canonical
from amanda_core.terminal import printable
from amanda_core.warning_locations import warn

__all__ = ["distribution_names", "readable_points", "unreadable"]

_warned = False


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


def readable_points(group: str) -> list[Any]:
    """Return the entry points of a group that can be read; warn of the first that cannot."""
    global _warned
    found: list[Any] = []
    seen: set[str] = set()
    for distribution in importlib_metadata.distributions():
        try:
            name = _place(distribution)
            if name not in seen:  # The first on the path is the one that is imported.
                seen.add(name)
                found += distribution.entry_points.select(group=group)
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
