"""Finding the installed tool that a name refers to.

Owns the rule for several tools of one name: it refers to the one that Amanda ships, and the others
are called ``DISTRIBUTION/TOOL``. Tools are not imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from amanda_core.plugins.installed import TOOL_GROUP, Installed, canonical, installed

__all__ = ["SHIPPED", "candidates", "is_shipped", "references"]

#: The distribution of the tools that are released together with the core.
SHIPPED = "amanda-tools"


def is_shipped(found: Installed) -> bool:
    """Return True for a tool of Amanda's own distribution."""
    return canonical(found.distribution) == SHIPPED


def candidates(reference: str, every: Sequence[Installed] | None = None) -> list[Installed]:
    """Return the tools that a reference matches; blocked ones only if there is no other.

    Args:
        reference: ``TOOL``, or ``DISTRIBUTION/TOOL``.
        every: All installed tools, if they are known.
    """
    distribution, _, name = reference.rpartition("/")
    named = [
        found
        for found in (installed(TOOL_GROUP) if every is None else every)
        if found.name == name
        and (not distribution or canonical(found.distribution) == canonical(distribution))
    ]
    usable = [found for found in named if not found.blocked]
    return [found for found in usable if is_shipped(found)][:1] or usable or named


def references() -> list[tuple[str, Installed]]:
    """Return each installed tool with its reference.

    The reference is empty if the tool cannot be distinguished from another one.
    """
    every = installed(TOOL_GROUP)
    return [(_reference(found, every), found) for found in every]


def _reference(found: Installed, every: Sequence[Installed]) -> str:
    same = [other for other in every if other.name == found.name and other is not found]
    rivals = [other for other in same if found.blocked or not other.blocked]
    if not rivals or is_shipped(found):
        return found.name
    origins = [canonical(other.distribution) for other in rivals]
    if not found.distribution or canonical(found.distribution) in origins:
        return ""
    return f"{found.distribution}/{found.name}"
