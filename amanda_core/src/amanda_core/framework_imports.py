"""Notifying drivers that their framework is loaded, before any tool is applied.

Owns when the hook `amanda_framework_imported` is called. If a driver fails in it, there is a
warning.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from amanda_core.containment import contain, described
from amanda_core.imports import ImportWatcher
from amanda_core.warning_locations import warn

if TYPE_CHECKING:
    from amanda_core.discovery import Driver

__all__ = ["announce_to"]


def announce_to(waiting: list[Driver]) -> None:
    """Call the hook of each of these drivers as soon as its framework is loaded."""
    for found in tuple(waiting):
        if any(module in sys.modules for module in found.info.modules):
            waiting.remove(found)
            _announce(found)
    if not waiting:
        return

    def imported(module: str) -> None:
        for found in tuple(waiting):
            if module in found.info.modules:
                waiting.remove(found)
                _announce(found)
        if not waiting:
            watcher.stop()

    watcher = ImportWatcher([name for d in waiting for name in d.info.modules], imported)
    watcher.start()


def _announce(found: Driver) -> None:
    try:
        found.call("amanda_framework_imported")
    except BaseException as error:
        contain(error)
        # It can refuse later what it could not prepare. The import must not fail.
        warn(
            f"Driver {found.info.name!r} of {found.distribution} could not prepare itself: "
            f"{described(error)}",
            importing=True,
        )
