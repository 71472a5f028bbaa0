"""Finding drivers and tools among the installed distributions, and wiring drivers with pluggy.

Owns the plugin manager. A broken driver found here is warned about once and skipped; one asked for
by name raises. Listing tools imports none of them.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import importlib_metadata
import pluggy

from amanda_core import hookspecs
from amanda_core.action import IPoint
from amanda_core.context import OpContext
from amanda_core.driver import DRIVER_API, DriverInfo, Finding
from amanda_core.errors import AmandaWarning, DriverError, MissingDriverError
from amanda_core.imports import ImportWatcher
from amanda_core.installed import BLOCKING, DRIVER_GROUP, TOOL_GROUP, installed
from amanda_core.results import printable

__all__ = ["DRIVER_GROUP", "TOOL_GROUP", "Driver", "driver", "drivers", "plugin_manager", "tools"]

_NO_DRIVER_FIX = (
    "Install the driver of your framework: pip install amanda-driver-<framework>; "
    "`amanda drivers` lists what is installed"
)


@dataclass(frozen=True, slots=True)
class Driver:
    """An installed and working driver.

    Attributes:
        info: What it says of itself.
        plugin: The pluggy plugin.
        distribution: Name and version of the distribution that it comes from.
    """

    info: DriverInfo
    plugin: Any
    distribution: str


class _CorePlugin:
    """The core's own part of the hooks."""

    @hookspecs.hookimpl
    def amanda_trigger_callback(self, context: OpContext, i_point: IPoint) -> None:
        context._session.run_analysis(context, i_point)


_manager: pluggy.PluginManager | None = None
_drivers: dict[str, Driver] = {}
_broken: dict[str, DriverError] = {}
# Two threads may apply their first tools at once.
_lock = threading.RLock()


def plugin_manager() -> pluggy.PluginManager:
    """The plugin manager of this process, with all installed drivers registered."""
    global _manager
    with _lock:
        if _manager is None:
            manager = pluggy.PluginManager("amanda")
            manager.add_hookspecs(hookspecs)
            manager.register(_CorePlugin(), "amanda-core")
            for found in installed(DRIVER_GROUP):
                if found.blocked:
                    continue
                try:
                    _register(manager, found.name, found.point.load(), found.origin)
                except Exception as error:
                    _skip(found.name, found.origin, error)
            _manager = manager
        return _manager


def register(plugin: Any, name: str, distribution: str = "registered by hand") -> Driver:
    """Register a driver that no entry point names, such as one under development or test.

    Raises:
        DriverError: It does not speak this interface.
    """
    return _register(plugin_manager(), name, plugin, distribution)


def unregister(name: str) -> None:
    """Undo `register`."""
    plugin_manager().unregister(_drivers.pop(name).plugin)


def drivers() -> tuple[Driver, ...]:
    """All installed drivers that work, in the order of discovery."""
    plugin_manager()
    return tuple(_drivers.values())


def use_only(names: Sequence[str]) -> None:
    """Forget all drivers but those called `names`; raises as `driver` does for each."""
    wanted = {id(driver(name)) for name in names}
    for name in [name for name, found in _drivers.items() if id(found) not in wanted]:
        unregister(name)


def driver(name: str) -> Driver:
    """The driver called `name`, or of the framework of that name.

    Raises:
        MissingDriverError: None of that name is installed.
        DriverError: It is installed but broken; the cause is chained.
    """
    plugin_manager()
    for key, found in _drivers.items():
        if name in (key, found.info.name):
            return found
    if name in _broken:
        raise _broken[name]
    if any(found.blocked and found.name == name for found in installed(DRIVER_GROUP)):
        raise MissingDriverError(
            f"The driver {name!r} is blocked", where=BLOCKING, fix="Take it out of that variable"
        )
    known = ", ".join(_drivers) or "none"
    raise MissingDriverError(
        f"No driver {name!r} is installed; there are: {known}", fix=_NO_DRIVER_FIX
    )


def preflight(found: Driver) -> list[Finding]:
    """What a driver finds in this environment; that it fails to look is a finding itself."""
    try:
        look = getattr(found.plugin, "amanda_preflight", None)
        return list(look()) if look is not None else []
    except Exception as error:
        message = f"Its preflight failed: {type(error).__name__}: {error}"
        return [Finding("error", message, "Reinstall or upgrade it")]


def announce() -> None:
    """Tell the drivers that want to know it of frameworks that are loaded, now or later."""
    waiting = [d for d in drivers() if getattr(d.plugin, "amanda_framework_imported", None)]
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
        found.plugin.amanda_framework_imported()
    except Exception as error:
        # What it could not prepare it will have to refuse; importing must not fail for it.
        warnings.warn(
            f"Driver {found.info.name!r} of {found.distribution} could not prepare itself: "
            f"{type(error).__name__}: {error}",
            AmandaWarning,
            stacklevel=2,
        )


def require_any() -> None:
    """Raise `MissingDriverError` if no driver is installed at all."""
    if not drivers():
        broken = "; ".join(str(error) for error in _broken.values())
        blocked = ", ".join(found.name for found in installed(DRIVER_GROUP) if found.blocked)
        if blocked:
            broken += f"{'; ' if broken else ''}{BLOCKING} blocks {blocked}"
        raise MissingDriverError(
            "No working driver is installed, so no operator can be seen"
            + (f" ({broken})" if broken else ""),
            fix=_NO_DRIVER_FIX,
        )


def tools() -> dict[str, importlib_metadata.EntryPoint]:
    """Name -> entry point of each installed tool not blocked; `.load()` gives its factory."""
    return {found.name: found.point for found in installed(TOOL_GROUP) if not found.blocked}


def _register(manager: pluggy.PluginManager, name: str, plugin: Any, origin: str) -> Driver:
    if manager.has_plugin(name):
        raise DriverError(
            f"Two drivers are called {name!r}; the second is of {origin}", fix="Uninstall one"
        )
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        if manager.has_plugin(name):
            manager.unregister(name=name)
        raise DriverError(f"Driver {name!r} does not fit the hooks: {error}") from error
    try:
        describe = getattr(plugin, "amanda_driver_info", None)
        if describe is None:
            raise DriverError(
                f"Driver {name!r} does not describe itself", fix="Implement amanda_driver_info"
            )
        info = describe()
        if info.api != DRIVER_API:
            raise DriverError(
                f"Driver {name!r} speaks driver API {info.api}, this core speaks {DRIVER_API}",
                fix="Install versions of amanda-core and of the driver that belong together",
            )
        for other, known in _drivers.items():
            if known.info.name == info.name:
                raise DriverError(
                    f"Drivers {other!r} and {name!r} are both of {info.name!r}",
                    fix="Uninstall one: an op would be intercepted twice",
                )
    except BaseException:
        manager.unregister(plugin)
        raise
    found = Driver(info, plugin, origin)
    _drivers[name] = found
    return found


def _skip(name: str, origin: str, error: Exception) -> None:
    broken = error if isinstance(error, DriverError) else None
    if broken is None:
        broken = DriverError(
            f"Driver {name!r} of {origin} cannot be loaded: {type(error).__name__}: {error}",
            fix="Reinstall or upgrade it",
        )
        broken.__cause__ = error
    _broken[name] = broken
    warnings.warn(f"Skipped: {printable(broken)}", AmandaWarning, stacklevel=4)
