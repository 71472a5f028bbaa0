"""Finding drivers, plugins and tools among the installed distributions, and wiring with pluggy.

Owns the plugin manager, through which every hook is called. A broken driver or plugin found here
is warned about once and skipped; a driver asked for by name raises. Listing tools imports none.
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
from amanda_core.action import Action, IPoint
from amanda_core.context import OpContext
from amanda_core.driver import DRIVER_API, DriverInfo, Finding
from amanda_core.errors import AmandaWarning, DriverError, MissingDriverError
from amanda_core.imports import ImportWatcher
from amanda_core.installed import (
    BLOCKING,
    DRIVER_GROUP,
    PLUGIN_GROUP,
    TOOL_GROUP,
    Installed,
    installed,
)
from amanda_core.results import printable

__all__ = [
    "DRIVER_GROUP",
    "PLUGIN_GROUP",
    "TOOL_GROUP",
    "Driver",
    "driver",
    "drivers",
    "plugin_manager",
    "tools",
]

#: The hooks that a plugin which is not a driver implements; it may wrap the others.
_OF_ALL = ("amanda_prepare_context", "amanda_trigger_callback", "amanda_action_recorded")

_NO_DRIVER_FIX = (
    "Install the driver of your framework: pip install amanda-driver-<framework>; "
    "`amanda drivers` lists what is installed"
)
_TOGETHER = "Install versions of amanda-core and of the driver that belong together"


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

    @property
    def loaded(self) -> tuple[str, ...]:
        """The modules of its framework that are loaded now."""
        return tuple(name for name in self.info.modules if sys.modules.get(name) is not None)

    def has(self, hook: str) -> bool:
        """Return True if the driver itself implements `hook`."""
        calls = getattr(plugin_manager().hook, hook).get_hookimpls()
        return any(call.plugin is self.plugin and not _is_wrapper(call) for call in calls)

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call this driver's implementation of `hook`, and the plugins that wrap it.

        Returns:
            What it returns; None where the driver does not implement it.
        """
        return _call(plugin_manager(), self.plugin, hook, **arguments)


class _CorePlugin:
    """The core's own part of the hooks."""

    @hookspecs.hookimpl
    def amanda_trigger_callback(self, context: OpContext, i_point: IPoint) -> None:
        context._session.run_analysis(context, i_point)

    @hookspecs.hookimpl
    def amanda_action_recorded(self, context: OpContext, action: Action) -> None:
        context._refuse_conflict(action)


_manager: pluggy.PluginManager | None = None
_drivers: dict[str, Driver] = {}
_broken: dict[str, DriverError] = {}
_broken_plugins: dict[str, DriverError] = {}
# Two threads may apply their first tools at once.
_lock = threading.RLock()


def plugin_manager() -> pluggy.PluginManager:
    """The plugin manager of this process, with all installed drivers and plugins registered."""
    global _manager
    with _lock:
        if _manager is None:
            manager = pluggy.PluginManager("amanda")
            manager.add_hookspecs(hookspecs)
            manager.register(_CorePlugin(), "amanda-core")
            # First the plugins: they may wrap what is asked of the drivers below.
            for found in installed(PLUGIN_GROUP):
                if not found.blocked:
                    try:
                        _register_plugin(manager, found.name, found.point.load(), found.origin)
                    except Exception as error:
                        _broken_plugins[found.name] = _skip("Plugin", found, error)
            for found in installed(DRIVER_GROUP):
                if not found.blocked:
                    try:
                        _register(manager, found.name, found.point.load(), found.origin)
                    except Exception as error:
                        _broken[found.name] = _skip("Driver", found, error)
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


def register_plugin(plugin: Any, name: str, distribution: str = "registered by hand") -> None:
    """Register a plugin that is not a driver and that no entry point names.

    Raises:
        DriverError: It does not fit the hooks, or implements one that only a driver can.
    """
    _register_plugin(plugin_manager(), name, plugin, distribution)


def unregister_plugin(name: str) -> None:
    """Undo `register_plugin`."""
    plugin_manager().unregister(name=_name_of_plugin(name))


def broken_plugins() -> dict[str, DriverError]:
    """Return what is wrong with each installed plugin, not a driver, that does not work."""
    plugin_manager()
    return dict(_broken_plugins)


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
    """Return what a driver finds in this environment; that it fails to look is a finding itself."""
    try:
        return list(found.call("amanda_preflight") or ())
    except Exception as error:
        message = f"Its preflight failed: {type(error).__name__}: {error}"
        return [Finding("error", message, "Reinstall or upgrade it")]


def announce() -> None:
    """Tell the drivers that want to know it of frameworks that are loaded, now or later."""
    waiting = [d for d in drivers() if d.has("amanda_framework_imported")]
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


def _is_wrapper(call: pluggy.HookImpl) -> bool:
    return call.wrapper or call.hookwrapper


def _call(manager: pluggy.PluginManager, plugin: Any, hook: str, **arguments: Any) -> Any:
    others = [known.plugin for known in _drivers.values() if known.plugin is not plugin]
    return manager.subset_hook_caller(hook, others)(**arguments)


def _name_of_plugin(name: str) -> str:
    # A distribution may give its driver and its plugin one name.
    return f"{PLUGIN_GROUP}:{name}"


def _fit(manager: pluggy.PluginManager, name: str, plugin: Any, what: str) -> None:
    """Register with pluggy what fits the hooks, under `name`."""
    for hook in vars(hookspecs):
        named = hook.startswith("amanda_") and getattr(plugin, hook, None) is not None
        if named and manager.parse_hookimpl_opts(plugin, hook) is None:
            raise DriverError(
                f"{what} has {hook}, which is not marked as a hook", fix="Mark it with hookimpl"
            )
    try:
        hash(plugin)  # Hooks of one driver are called without the others, which stand in a set.
        manager.register(plugin, name)
        manager.check_pending()
    except (pluggy.PluginValidationError, TypeError, ValueError) as error:
        if manager.get_plugin(name) is plugin:
            manager.unregister(name=name)
        raise DriverError(f"{what} does not fit the hooks: {error}") from error


def _register_plugin(manager: pluggy.PluginManager, name: str, plugin: Any, origin: str) -> None:
    what = f"Plugin {name!r}"
    if manager.has_plugin(_name_of_plugin(name)):
        raise DriverError(
            f"Two plugins are called {name!r}; the second is of {origin}", fix="Uninstall one"
        )
    _fit(manager, _name_of_plugin(name), plugin, what)
    for caller in manager.get_hookcallers(plugin) or ():
        own = [c for c in caller.get_hookimpls() if c.plugin is plugin and not _is_wrapper(c)]
        if own and caller.name not in _OF_ALL:
            manager.unregister(plugin)
            raise DriverError(
                f"{what} implements {caller.name}, which only a driver can",
                fix=f"Wrap it: hookimpl(wrapper=True); or use the group {DRIVER_GROUP}",
            )


def _register(manager: pluggy.PluginManager, name: str, plugin: Any, origin: str) -> Driver:
    if manager.has_plugin(name):
        raise DriverError(
            f"Two drivers are called {name!r}; the second is of {origin}", fix="Uninstall one"
        )
    _fit(manager, name, plugin, f"Driver {name!r}")
    try:
        try:
            info = _call(manager, plugin, "amanda_driver_info")
        except Exception as error:
            raise DriverError(
                f"Driver {name!r} of {origin} fails to describe itself: "
                f"{type(error).__name__}: {error}",
                fix=_TOGETHER,
            ) from error
        if info is None:
            raise DriverError(
                f"Driver {name!r} does not describe itself", fix="Implement amanda_driver_info"
            )
        if info.api != DRIVER_API:
            raise DriverError(
                f"Driver {name!r} speaks driver API {info.api}, this core speaks {DRIVER_API}",
                fix=_TOGETHER,
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


def _skip(kind: str, found: Installed, error: Exception) -> DriverError:
    """Warn of a driver or plugin that does not work, and return what is wrong with it."""
    broken = error if isinstance(error, DriverError) else None
    if broken is None:
        broken = DriverError(
            f"{kind} {found.name!r} of {found.origin} cannot be loaded: "
            f"{type(error).__name__}: {error}",
            fix="Reinstall or upgrade it",
        )
        broken.__cause__ = error
    warnings.warn(f"Skipped: {printable(broken)}", AmandaWarning, stacklevel=4)
    return broken
