"""Asking drivers again that did not attach when tools were applied.

Owns when they are asked: after the import of a framework that was not loaded yet, and at the end of
an import that is running. If a driver still declines, there is a warning.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

from amanda_core.plugins.imports import EndOfImport, ImportWatcher, running_imports

if TYPE_CHECKING:
    from amanda_core.plugins.discovery import Driver

__all__ = ["DeclinedDrivers"]


class DeclinedDrivers:
    """The drivers that declined to attach for the applied tools of one thread.

    Args:
        warn_once: Gives a warning, `importing` if an import led to it; the same one only once.
        attach: Asks a driver to attach; returns False if it declines.
    """

    def __init__(self, warn_once: Callable[..., None], attach: Callable[[Driver], bool]) -> None:
        self._warn_once, self._attach = warn_once, attach
        self._thread = threading.get_ident()
        #: The imports that were running before the tools were applied.
        self._older = running_imports()
        self._ends: list[EndOfImport] = []
        self._waiting: list[Driver] = []
        self._watcher: ImportWatcher | None = None

    def start(self, drivers: Sequence[Driver]) -> None:
        """Wait for the imports after which these drivers may attach."""
        self._waiting += drivers
        for driver in drivers:
            self._wait(driver, importing=False)
        names = [name for driver in drivers for name in driver.info.modules]
        self._watcher = ImportWatcher(names, self._imported)
        self._watcher.start()

    def stop(self) -> None:
        """Stop asking drivers."""
        self._waiting.clear()
        for end in self._ends:
            end.cancel()
        if self._watcher is not None:
            self._watcher.stop()

    def _ask(self, driver: Driver) -> bool:
        if not self._attach(driver):
            return False
        self._waiting[:] = [other for other in self._waiting if other is not driver]
        return True

    def _wait(self, driver: Driver, *, importing: bool) -> None:
        """Ask a driver again at the end of an import in which it declined."""
        own = {module.partition(".")[0] for module in driver.info.modules}
        for spec in running_imports():
            older = any(spec is other for other in self._older)
            if not older or spec.name.partition(".")[0] in own:
                self._ends.append(EndOfImport(spec, partial(self._ask_finally, driver, spec)))
                return
        self._warn_of(driver, importing=importing)

    def _ask_finally(self, driver: Driver, spec: ModuleSpec) -> None:
        # After an import that has failed there is nothing to attach to.
        waits = any(other is driver for other in self._waiting)
        if waits and spec.name in sys.modules and not self._ask(driver):
            self._warn_of(driver, importing=True)

    def _warn_of(self, driver: Driver, *, importing: bool) -> None:
        """Warn of a driver that does not attach although its framework is loaded."""
        for module in driver.loaded:
            self._warn_once(
                f"{module} is loaded, but its driver {driver.info.name!r} does not attach to it: "
                "its operators are not instrumented. `amanda doctor` may say why",
                importing=importing,
            )
            return

    def _imported(self, module: str) -> None:
        if threading.get_ident() != self._thread:
            self._warn_once(
                f"{module} was imported by another thread than the one that applied the tools; its "
                "operators are instrumented after the next `apply`.",
                importing=True,
            )
            return
        for driver in tuple(self._waiting):
            if module in driver.info.modules and not self._ask(driver):
                self._wait(driver, importing=True)
