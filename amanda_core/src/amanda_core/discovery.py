"""Finding drivers, plugins and tools among the installed distributions, and wiring with pluggy.

Owns the plugin manager, through which every hook is called. A broken driver or plugin found here
is warned about once and skipped; a driver asked for by name raises. Listing tools imports none.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import importlib_metadata
import pluggy

from amanda_core import hookspecs, plugin_answers
from amanda_core.action import Action, IPoint
from amanda_core.containment import contain, described, warn
from amanda_core.context import OpContext
from amanda_core.driver import DriverInfo
from amanda_core.errors import DriverError, MissingDriverError
from amanda_core.installed import (
    DRIVER_GROUP,
    PLUGIN_GROUP,
    TOOL_GROUP,
    Installed,
    canonical,
    installed,
)
from amanda_core.installed import block as block_names
from amanda_core.terminal import printable

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
_discovering = False
_without = ""
_drivers: dict[str, Driver] = {}
_broken: dict[str, DriverError] = {}
_broken_plugins: dict[str, DriverError] = {}
# Two threads may apply their first tools at once.
_lock = threading.RLock()


def plugin_manager() -> pluggy.PluginManager:
    """Return the plugin manager of this process, with all installed plugins registered."""
    global _manager, _discovering
    with _lock:
        if _manager is None:
            if _discovering:
                raise DriverError(
                    "A plugin asks for the installed plugins while they are being imported",
                    fix="Ask when they are needed, and not when the module is imported",
                )
            _discovering = True
            try:
                _manager = _discovered()
            except BaseException:
                # Ctrl-C: the next caller begins from nothing, or it would find each driver twice.
                for found in (_drivers, _broken, _broken_plugins):
                    found.clear()
                raise
            finally:
                _discovering = False
            # Not before all is found: what shows a warning is code of the program's.
            for broken in (*_broken_plugins.values(), *_broken.values()):
                warn(f"Skipped: {printable(broken)}", stacklevel=3)
        return _manager


def _discovered() -> pluggy.PluginManager:
    manager = pluggy.PluginManager("amanda")
    manager.add_hookspecs(hookspecs)
    manager.register(_CorePlugin(), "amanda-core")
    # First the plugins: they may wrap what is asked of the drivers below.
    for group, kind, register_one, broken in (
        (PLUGIN_GROUP, "Plugin", _register_plugin, _broken_plugins),
        (DRIVER_GROUP, "Driver", _register, _broken),
    ):
        for found in installed(group):
            if not found.blocked:
                try:
                    register_one(manager, found.name, found.point.load(), found.origin)
                except BaseException as error:
                    contain(error)
                    broken[found.name] = _as_driver_error(kind, found, error)
    return manager


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


def use_only(names: Sequence[str], where: str = "") -> None:
    """Forget all drivers but those called `names`; raises as `driver` does for each.

    Args:
        names: The drivers. Without one, tools are applied and see nothing.
        where: What names them, for messages.
    """
    global _without
    wanted = {id(driver(name)) for name in names}
    for name in [name for name, found in _drivers.items() if id(found) not in wanted]:
        unregister(name)
    _without = "" if names else where or "discovery.use_only()"


def without_drivers() -> str:
    """Return what asks for no driver at all; empty where nothing does."""
    return _without


def block(names: Sequence[str], where: str) -> None:
    """Block plugins and distributions of these names in this process; see `installed.block`.

    Nothing of them is imported from now on. What has been imported already is not called any more.
    """
    block_names(names, where)
    if _manager is None:
        return
    for found in installed(DRIVER_GROUP):
        if found.blocked:
            _broken.pop(found.name, None)
            known = _drivers.get(found.name)
            if known is not None and known.distribution == found.origin:
                unregister(found.name)
    for found in installed(PLUGIN_GROUP):
        if found.blocked:
            _broken_plugins.pop(found.name, None)
            if _manager.has_plugin(_name_of_plugin(found.name)):
                unregister_plugin(found.name)


def driver(name: str) -> Driver:
    """The driver called `name`, or of the framework of that name.

    Raises:
        MissingDriverError: None of that name is installed.
        DriverError: It is installed but broken; the cause is chained.
    """
    plugin_manager()
    wanted = canonical(name)
    for key, found in _drivers.items():
        if wanted in (canonical(key), canonical(found.info.name)):
            return found
    for key, broken in _broken.items():
        if canonical(key) == wanted:
            raise broken
    for one in installed(DRIVER_GROUP):
        if one.blocked and canonical(one.name) == wanted:
            raise MissingDriverError(
                f"The driver {name!r} is blocked by {one.blocked}", fix="Take it out there"
            )
    known = ", ".join(_drivers) or "none"
    raise MissingDriverError(
        f"No driver {name!r} is installed; there are: {known}", fix=_NO_DRIVER_FIX
    )


def driver_of(found: Installed) -> Driver:
    """Return the driver of an entry point; raises as `driver` does."""
    known = driver(found.name)
    if known.distribution != found.origin and found.name in _broken:
        raise _broken[found.name]
    return known


def announce() -> None:
    """Tell the drivers that want to know it of frameworks that are loaded, now or later."""
    waiting = [d for d in drivers() if d.has("amanda_framework_imported")]
    if waiting:
        from amanda_core.announcing import announce_to

        announce_to(waiting)


def require_any() -> None:
    """Raise `MissingDriverError` if no driver works, unless none is wanted."""
    if not drivers() and not _without:
        broken = "; ".join(str(error) for error in _broken.values())
        for found in installed(DRIVER_GROUP):
            if found.blocked:
                broken += f"{'; ' if broken else ''}{found.blocked} blocks {found.name}"
        raise MissingDriverError(
            "No working driver is installed, so no operator can be seen"
            + (f" ({broken})" if broken else ""),
            fix=_NO_DRIVER_FIX,
        )


def tools() -> dict[str, importlib_metadata.EntryPoint]:
    """Return the entry point of each installed tool that is not blocked, by how it is asked for.

    That is its name, or ``DISTRIBUTION/TOOL`` where another tool has the name. ``load()`` of an
    entry point gives the factory.
    """
    from amanda_core import tool_names

    return {
        reference: found.point
        for reference, found in tool_names.references()
        if reference and not found.blocked
    }


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
    try:
        for hook in vars(hookspecs):
            named = hook.startswith("amanda_") and getattr(plugin, hook, None) is not None
            if named and manager.parse_hookimpl_opts(plugin, hook) is None:
                raise DriverError(
                    f"{what} has {hook}, which is not marked as a hook", fix="Mark it with hookimpl"
                )
        hash(plugin)  # Hooks of one driver are called without the others, which stand in a set.
        manager.register(plugin, name)
        manager.check_pending()
    except BaseException as error:
        if manager.get_plugin(name) is plugin:
            manager.unregister(name=name)
        contain(error)
        if isinstance(error, DriverError):
            raise
        # Also what its attributes raise: pluggy looks at each.
        raise DriverError(f"{what} does not fit the hooks: {described(error)}") from error


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
        info = _described_by(manager, name, plugin, origin)
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


def _described_by(manager: pluggy.PluginManager, name: str, plugin: Any, origin: str) -> DriverInfo:
    what = f"Driver {name!r} of {origin}"
    try:
        return plugin_answers.check_info(_call(manager, plugin, "amanda_driver_info"), what)
    except DriverError:
        raise
    except BaseException as error:
        contain(error)
        raise DriverError(
            f"{what} fails to describe itself: {described(error)}", fix=plugin_answers.TOGETHER
        ) from error


def _as_driver_error(kind: str, found: Installed, error: BaseException) -> DriverError:
    """Return what is wrong with a driver or plugin that does not work."""
    if isinstance(error, DriverError):
        return error
    broken = DriverError(
        f"{kind} {found.name!r} of {found.origin} cannot be loaded: {described(error)}",
        fix="Reinstall or upgrade it",
    )
    broken.__cause__ = error
    return broken
