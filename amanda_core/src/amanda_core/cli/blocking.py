"""Blocking plugins by flag and configuration, for the commands that list what is installed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amanda_core import discovery

if TYPE_CHECKING:
    from amanda_core.config import Setting

__all__ = ["DISABLE_PLUGINS", "block", "with_blocking"]

DISABLE_PLUGINS = click.option(
    "--disable-plugins",
    metavar="A,B",
    help="Use no plugins (drivers, tools and others) of these names, nor any of distributions of "
    "these names; * for all. Adds to AMANDA_DISABLE_PLUGINS and to the configuration.",
)


def with_blocking(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command: give it --disable-plugins, and what the configuration blocks."""

    @DISABLE_PLUGINS
    @click.option("--no-config", is_flag=True, help="Read no [tool.amanda] of a pyproject.toml.")
    @functools.wraps(command)
    def blocked(*arguments: Any, disable_plugins: str | None, no_config: bool, **more: Any) -> Any:
        from amanda_core.config import from_flags, load

        flags = from_flags(disabled=disable_plugins)
        config = load(Path.cwd(), flags, use_file=not no_config, environment={})
        block(config.disabled)
        return command(*arguments, **more)

    return blocked


def block(disabled: Iterable[Setting]) -> None:
    """Block what sources of the configuration disable, before anything of it is imported."""
    for setting in disabled:
        discovery.block(setting.value, setting.where)
