"""`amanda tools`: the installed tools, and the options of one."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from enum import Enum
from typing import Any

import click

from amanda_core.cli.drawing import show, show_json
from amanda_core.installed import TOOL_GROUP, installed
from amanda_core.results import Table, printable

__all__ = ["describe", "tools"]


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
def tools(name: str | None, as_json: bool) -> None:
    """List the installed tools, or with NAME the options of one.

    The list imports none of them, so it does not show which are broken; `amanda doctor` does. Tools
    that AMANDA_DISABLE_PLUGINS (names with commas between, or *) blocks are listed as blocked.
    """
    if name is not None:
        _one(name, as_json)
        return
    found = describe()
    if as_json:
        show_json(found)
        return
    rows = [
        (tool["name"], tool["status"], f"{tool['distribution']} {tool['version']}", tool["factory"])
        for tool in found
    ]
    show(Table("", ("tool", "status", "distribution", "factory"), rows), sys.stdout)
    if not found:
        click.echo("No tool is installed: pip install amanda-tools", err=True)


def describe() -> list[dict[str, Any]]:
    """Return what is known of each installed tool without importing it."""
    every = installed(TOOL_GROUP)
    names = Counter(found.name for found in every if not found.blocked)
    return [
        {
            "name": found.name,
            "status": "blocked"
            if found.blocked
            else "duplicate"
            if names[found.name] > 1
            else "ok",
            "distribution": found.distribution,
            "version": found.version,
            "factory": found.value,
        }
        for found in every
    ]


def _one(name: str, as_json: bool) -> None:
    from amanda_core.config import factories

    made = factories.factory(name)
    known = factories.options(made)
    about = inspect.getdoc(made) or ""
    if as_json:
        show_json(
            {
                "name": name,
                "about": about,
                "options": [
                    {
                        "name": option.name,
                        "type": option.expected or None,
                        "required": option.required,
                        "default": None if option.required else _plain(option.default),
                    }
                    for option in known
                ],
            }
        )
        return
    click.echo("\n".join(printable(line) for line in [name, "", *about.splitlines(), ""]))
    if not known:
        click.echo("It has no options.")
        return
    rows = [
        (
            option.name,
            option.expected or "(in code only)",
            "(required)" if option.required else _plain(option.default),
        )
        for option in known
    ]
    show(Table("", ("option", "type", "default"), rows), sys.stdout)


def _plain(default: Any) -> Any:
    if isinstance(default, Enum):
        return default.name
    return default if isinstance(default, (bool, int, float, str, type(None))) else str(default)
