"""Blocking installed plugins by a flag or the configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amanda_core.errors import AmandaError
from amanda_core.plugins import discovery, installed

if TYPE_CHECKING:
    from amanda_core.config import Setting

__all__ = ["DISABLE_PLUGINS", "block", "block_configured", "use_only", "with_blocking"]

#: What click is told of --disable-plugins.
DISABLE_PLUGINS: dict[str, Any] = {
    "metavar": "A,B",
    "help": "Use no plugins (drivers, tools and others) of these names, nor any of distributions "
    "of these names; * for all. Adds to AMANDA_DISABLE_PLUGINS and to the configuration.",
}


def with_blocking(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command, so that --disable-plugins and the configuration can block plugins."""

    @click.option("--disable-plugins", **DISABLE_PLUGINS)
    @click.option("--no-config", is_flag=True, help="Read no [tool.amanda] of a pyproject.toml.")
    @functools.wraps(command)
    def blocked(*arguments: Any, disable_plugins: str | None, no_config: bool, **more: Any) -> Any:
        block_configured(disable_plugins, use_file=not no_config)
        return command(*arguments, **more)

    return blocked


def block_configured(flag: str | None = None, *, use_file: bool = True) -> None:
    """Block the plugins that a flag and the configuration of the current folder disable.

    Raises:
        ConfigError: One of them is malformed.
    """
    from amanda_core.config import from_flags, load

    flags = from_flags(disabled=flag)
    block(load(Path.cwd(), flags, use_file=use_file, environment={}).disabled)


def block(disabled: Iterable[Setting]) -> None:
    """Block the plugins and distributions that sources of the configuration disable.

    They are not imported from now on. Those that are already imported are not called any more.
    """
    for setting in disabled:
        for name in setting.value:
            installed.blocked.setdefault(name, setting.where)
    registered = discovery.registered
    if registered is None:
        return  # Nothing has been imported.
    if not installed.blocked_names():
        return
    points = installed.entry_points()
    for found in installed.installed(installed.DRIVER_GROUP, points):
        if found.blocked:
            registered.broken.pop(found.name, None)
            known = registered.drivers.get(found.name)
            if known is not None and known.distribution == found.origin:
                registered.unregister(found.name)
    for found in installed.installed(installed.PLUGIN_GROUP, points):
        if found.blocked:
            registered.broken_plugins.pop(found.name, None)
            if registered.manager.has_plugin(discovery.plugin_key(found.name)):
                discovery.unregister_plugin(found.name)


def use_only(names: Sequence[str], where: str) -> None:
    """Forget all drivers but those called `names`; raises as `discovery.driver` does for each.

    Args:
        names: The drivers. If there are none, tools are applied but see no operators.
        where: The setting that names them, for messages.
    """
    try:
        wanted = {id(discovery.driver(name)) for name in names}
        registered = discovery.plugins()
    except AmandaError as error:
        raise type(error)(error.what, where=where, fix=error.fix) from error
    for name, found in tuple(registered.drivers.items()):
        if id(found) not in wanted:
            registered.unregister(name)
    registered.without_drivers = "" if names else where
