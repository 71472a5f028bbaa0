"""Notifying drivers that their framework is loaded, before any tool is applied.

Owns when the hook `amanda_framework_imported` is called. If a driver fails in it, there is a
warning.
"""

from __future__ import annotations

import sys

from amanda_core.plugins.discovery import Driver, drivers
from amanda_core.plugins.imports import ImportWatcher
from amanda_core.runtime.containment import contain, described
from amanda_core.runtime.warning_locations import warn

__all__ = ["announce", "announce_to"]

#: True in ``python -m amanda``. Its flags may block drivers, so it announces after reading them.
_IS_COMMAND = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv) :][:1] == ["amanda"]


def announce(*, by_command: bool = False) -> None:
    """Call `amanda_framework_imported` of drivers whose frameworks are loaded, now or later.

    Args:
        by_command: Whether the command line calls, instead of the import of `amanda`.
    """
    if by_command is not _IS_COMMAND:
        return
    waiting = [d for d in drivers() if d.has("amanda_framework_imported")]
    if waiting:
        announce_to(waiting)


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
