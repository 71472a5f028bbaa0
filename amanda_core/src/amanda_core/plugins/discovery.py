"""Finding drivers, plugins and tools among the installed distributions, and wiring with pluggy.

Owns the plugin manager, through which every hook is called. A broken driver or plugin causes one
warning and is skipped. A broken driver that is requested by name raises. Listing tools does not
import them. A little over 400 lines: a fifth are the checks of what drivers say of themselves.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import importlib_metadata
import pluggy

from amanda_core.errors import DriverError, MissingDriverError
from amanda_core.interface import hookspecs
from amanda_core.interface.driver import DRIVER_API, DriverInfo
from amanda_core.plugins import tool_names
from amanda_core.plugins.hook_manager import HookManager
from amanda_core.plugins.installed import (
    DRIVER_GROUP,
    PLUGIN_GROUP,
    TOOL_GROUP,
    canonical,
    entry_points,
    installed,
)
from amanda_core.runtime.containment import CALLERS, driver_errors
from amanda_core.runtime.terminal import printable
from amanda_core.runtime.warning_locations import warn

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

#: The hooks that any plugin may implement. Only drivers implement the others; plugins may wrap
#: them.
_OF_ALL = ("amanda_prepare_context", "amanda_trigger_callback", "amanda_action_recorded")

_NO_DRIVER_FIX = (
    "Install the driver of your framework: pip install amanda-driver-<framework>; "
    "`amanda drivers` lists what is installed"
)

#: What to do if a driver and the core do not fit together.
_TOGETHER = "Install versions of amanda-core and of the driver that belong together"

#: Name -> plugin of the core itself, which implements hooks as others do.
_OWN: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Driver:
    """An installed and working driver.

    Attributes:
        info: Its description of itself.
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
        return _implements(self.plugin, getattr(plugin_manager().hook, hook))

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call this driver's implementation of `hook`, and the plugins that wrap it.

        Returns:
            The result of the hook; None if the driver does not implement it.
        """
        return plugins().call(self.plugin, hook, **arguments)


class Plugins:
    """The plugins that are registered in this process, and those that could not be.

    Attributes:
        manager: Pluggy's manager, through which every hook is called.
        drivers: Name -> driver, in the order of discovery.
        broken: Name -> what is wrong with an installed driver.
        broken_plugins: Name -> what is wrong with an installed plugin that is not a driver.
        without_drivers: The setting that requests no driver at all, or an empty string.
    """

    def __init__(self) -> None:
        self.manager = HookManager("amanda")
        self.manager.add_hookspecs(hookspecs)
        for name, plugin in _OWN.items():
            self.manager.register(plugin, name)
        self.drivers: dict[str, Driver] = {}
        self.broken: dict[str, DriverError] = {}
        self.broken_plugins: dict[str, DriverError] = {}
        self.without_drivers = ""

    def register_installed(self) -> None:
        """Register every installed plugin that works and is not blocked."""
        points = entry_points()
        # Plugins come first, because they may wrap the hooks that are called for drivers below.
        for group, kind, register_one, broken in (
            (PLUGIN_GROUP, "Plugin", self.register_plugin, self.broken_plugins),
            (DRIVER_GROUP, "Driver", self.register, self.broken),
        ):
            for found in installed(group, points):
                if found.blocked:
                    continue
                what = f"{kind} {found.name!r} of {found.origin} cannot be loaded"
                try:
                    with driver_errors(what, fix="Reinstall or upgrade it"):
                        register_one(found.point.load(), found.name, found.origin)
                except DriverError as error:
                    broken[found.name] = error

    def register(self, plugin: Any, name: str, origin: str) -> Driver:
        """Register a driver; see the function of this name."""
        with self._added(plugin, name, origin, "Driver", name):
            what = f"Driver {name!r} of {origin}"
            with driver_errors(f"{what} fails to describe itself", fix=_TOGETHER):
                info = _check_info(self.call(plugin, "amanda_driver_info"), what)
            for other, known in self.drivers.items():
                if known.info.name == info.name:
                    raise DriverError(
                        f"Drivers {other!r} and {name!r} are both for {info.name!r}",
                        fix="Uninstall one: an op would be intercepted twice",
                    )
        # Only a plugin that is a module has a name.
        CALLERS.update((*info.modules, getattr(plugin, "__name__", "").partition(".")[0]))
        self.drivers[name] = Driver(info, plugin, origin)
        return self.drivers[name]

    def unregister(self, name: str) -> None:
        """Undo `register`."""
        self.manager.unregister(self.drivers.pop(name).plugin)

    def register_plugin(self, plugin: Any, name: str, origin: str) -> None:
        """Register a plugin that is not a driver; see the function of this name."""
        with self._added(plugin, name, origin, "Plugin", plugin_key(name)):
            for caller in self.manager.get_hookcallers(plugin) or ():
                if caller.name not in _OF_ALL and _implements(plugin, caller):
                    raise DriverError(
                        f"Plugin {name!r} implements {caller.name}, which only a driver can",
                        fix=f"Wrap it: hookimpl(wrapper=True); or use the group {DRIVER_GROUP}",
                    )

    def call(self, plugin: Any, hook: str, **arguments: Any) -> Any:
        """Call one driver's implementation of `hook`, and the plugins that wrap it."""
        calls = self.manager.direct.of_drivers
        if (call := calls.get((plugin, hook))) is None:
            others = [known.plugin for known in self.drivers.values() if known.plugin is not plugin]
            caller = self.manager.subset_hook_caller(hook, others)
            call = calls[plugin, hook] = self.manager.direct.call_of(caller)
        return call(**arguments)

    @contextmanager
    def _added(self, plugin: Any, name: str, origin: str, kind: str, key: str) -> Iterator[None]:
        """Register a plugin that fits the hooks with pluggy; undo it if a further check fails."""
        if self.manager.has_plugin(key):
            raise DriverError(
                f"Two {kind.lower()}s are called {name!r}; the second one is from {origin}",
                fix="Uninstall one",
            )
        what = f"{kind} {name!r}"
        try:
            # This includes errors of its attributes: pluggy reads each of them.
            with driver_errors(f"{what} does not fit the hooks"):
                for hook in vars(hookspecs):
                    named = hook.startswith("amanda_") and getattr(plugin, hook, None) is not None
                    if named and self.manager.parse_hookimpl_opts(plugin, hook) is None:
                        raise DriverError(
                            f"{what} has {hook}, which is not marked as a hook",
                            fix="Mark it with hookimpl",
                        )
                hash(plugin)  # To call the hooks of one driver, pluggy makes a set of the others.
                self.manager.register(plugin, key)
                self.manager.check_pending()
            yield
        except BaseException:
            if self.manager.get_plugin(key) is plugin:
                self.manager.unregister(name=key)
            raise


#: The plugins of this process; None before the first use.
registered: Plugins | None = None
_discovering = False
# Two threads may apply their first tools at once.
_lock = threading.RLock()


def plugins() -> Plugins:
    """Return the plugins of this process; the first call registers all installed ones."""
    global registered, _discovering
    with _lock:
        if registered is None:
            if _discovering:
                raise DriverError(
                    "A plugin requests the installed plugins while they are being imported",
                    fix="Request them when they are needed, not while its module is imported",
                )
            _discovering = True
            try:
                found = Plugins()
                found.register_installed()
            finally:
                _discovering = False
            registered = found
            # Warn after all are found: showing a warning may run code of the program.
            for broken in (*found.broken_plugins.values(), *found.broken.values()):
                warn(f"Skipped: {printable(broken)}", importing=True)
        return registered


def add_own(plugin: Any, name: str) -> None:
    """Register a plugin of the core itself, in every manager: one part of it has the hooks."""
    _OWN[name] = plugin
    if registered is not None:
        registered.manager.register(plugin, name)


def plugin_manager() -> HookManager:
    """Return the plugin manager of this process, with all installed plugins registered."""
    return plugins().manager


def register(plugin: Any, name: str, distribution: str = "registered by hand") -> Driver:
    """Register a driver that no entry point names, such as one under development or test.

    Raises:
        DriverError: It does not speak this interface.
    """
    return plugins().register(plugin, name, distribution)


def unregister(name: str) -> None:
    """Undo `register`."""
    plugins().unregister(name)


def register_plugin(plugin: Any, name: str, distribution: str = "registered by hand") -> None:
    """Register a plugin that is not a driver and that no entry point names.

    Raises:
        DriverError: It does not fit the hooks, or implements one that only a driver can.
    """
    plugins().register_plugin(plugin, name, distribution)


def unregister_plugin(name: str) -> None:
    """Undo `register_plugin`."""
    plugin_manager().unregister(name=plugin_key(name))


def plugin_key(name: str) -> str:
    """Return the name under which pluggy has a plugin that is not a driver."""
    # A distribution may give its driver and its plugin one name.
    return f"{PLUGIN_GROUP}:{name}"


def drivers() -> tuple[Driver, ...]:
    """Return all installed drivers that work, in the order of discovery."""
    return tuple(plugins().drivers.values())


def driver(name: str) -> Driver:
    """Return the driver called `name`, or the one of the framework of that name.

    Raises:
        MissingDriverError: No such driver is installed.
        DriverError: The driver is installed but broken; the cause is chained.
    """
    known = plugins()
    wanted = canonical(name)
    for key, found in known.drivers.items():
        if wanted in (canonical(key), canonical(found.info.name)):
            return found
    broken = {canonical(key): error for key, error in known.broken.items()}
    if wanted in broken:
        raise broken[wanted]
    blocked = {canonical(one.name): one.blocked for one in installed(DRIVER_GROUP) if one.blocked}
    if wanted in blocked:
        raise MissingDriverError(
            f"The driver {name!r} is blocked by {blocked[wanted]}", fix="Remove it there"
        )
    names = ", ".join(known.drivers) or "none"
    raise MissingDriverError(
        f"No driver {name!r} is installed; there are: {names}", fix=_NO_DRIVER_FIX
    )


def require_any() -> None:
    """Raise `MissingDriverError` if no driver works, unless none is wanted."""
    known = plugins()
    if known.drivers or known.without_drivers:
        return
    reasons = [str(error) for error in known.broken.values()]
    reasons += [f"{d.blocked} blocks {d.name}" for d in installed(DRIVER_GROUP) if d.blocked]
    raise MissingDriverError(
        "No working driver is installed, so operators cannot be instrumented"
        + (f" ({'; '.join(reasons)})" if reasons else ""),
        fix=_NO_DRIVER_FIX,
    )


def tools() -> dict[str, importlib_metadata.EntryPoint]:
    """Return the entry point of each installed tool that is not blocked, by its reference.

    The reference is the tool's name, or ``DISTRIBUTION/TOOL`` if several tools have that name.
    ``load()`` of an entry point returns the factory.
    """
    named = tool_names.references()
    return {name: found.point for name, found in named if name and not found.blocked}


def _implements(plugin: Any, caller: pluggy.HookCaller) -> bool:
    """Return True if a plugin itself implements a hook, and does not only wrap it."""
    own = [call for call in caller.get_hookimpls() if call.plugin is plugin]
    return not all(call.wrapper or call.hookwrapper for call in own)


def _check_info(info: Any, what: str) -> DriverInfo:
    """Return a driver's description if it is well formed and for this core's interface.

    Args:
        info: The driver's answer.
        what: The driver, for messages.

    Raises:
        DriverError: It is malformed, or for another interface.
    """
    if info is None:
        raise DriverError(f"{what} does not describe itself", fix="Implement amanda_driver_info")
    # This comes first, because a description for another interface may have another form.
    api = getattr(info, "api", None)
    if type(api) is int and api != DRIVER_API:
        raise DriverError(
            f"{what} has driver API {api}, but this core has {DRIVER_API}", fix=_TOGETHER
        )
    if not isinstance(info, DriverInfo):
        raise _malformed(what, f"a {type(info).__name__} and not a DriverInfo")
    for field, is_right, form in (
        ("api", type(api) is int, "a whole number"),
        ("name", _is_name(info.name), "a text without '/'"),
        ("modules", _are_texts(info.modules), "a tuple of texts"),
        ("namespaces", _are_texts(info.namespaces), "a tuple of texts"),
        ("capabilities", _are_capabilities(info.capabilities), "a frozenset of texts, or by mode"),
        ("vocabulary", _is_vocabulary(info.vocabulary), "a mapping of texts to texts"),
    ):
        if not is_right:
            raise _malformed(what, f"with {field}={getattr(info, field)!r:.80}, not {form}")
    # Capabilities are looked up by the first part of a context's namespace: those of a driver under
    # another name would never be enforced.
    for namespace in info.namespaces:
        if namespace.partition("/")[0] != info.name:
            form = f"namespaces that begin with its name, {info.name}/"
            raise _malformed(what, f"with the namespace {namespace!r}, not {form}")
    return info


def _malformed(what: str, how: str) -> DriverError:
    return DriverError(f"{what} describes itself by {how}", fix="Correct its amanda_driver_info")


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name) and "/" not in name


def _are_texts(value: Any, *kinds: type[Collection[Any]]) -> bool:
    # A single text would pass as a sequence of its letters.
    return isinstance(value, kinds or (tuple, list)) and all(isinstance(x, str) for x in value)


def _are_capabilities(value: Any) -> bool:
    if isinstance(value, Mapping):
        return _are_texts([*value]) and all(_are_texts(v, frozenset) for v in value.values())
    return _are_texts(value, frozenset)


def _is_vocabulary(value: Any) -> bool:
    return isinstance(value, Mapping) and _are_texts([*value, *value.values()])
