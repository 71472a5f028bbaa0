"""`amanda tools`: the installed tools, and the options of a tool."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from enum import Enum
from typing import TYPE_CHECKING, Any

import click

from amanda_core.cli.blocking import with_blocking
from amanda_core.cli.drawing import show, show_json
from amanda_core.errors import AmandaError
from amanda_core.plugins import tool_names
from amanda_core.plugins.installed import Installed
from amanda_core.results import Table, printable
from amanda_core.runtime.collection import without_collection
from amanda_core.runtime.containment import contain, described

if TYPE_CHECKING:
    from amanda_core.config.factories import Option

__all__ = ["DROP", "describe", "tools"]

#: Columns that are left out on a narrow terminal, the first ones first.
DROP = ("distribution", "works on")


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
@with_blocking
def tools(name: str | None, as_json: bool) -> None:
    """List the installed tools, or with NAME the options of one.

    What cannot be imported is listed as broken, with what is wrong. Of two tools of one name, the
    one that is not Amanda's own is listed, and asked for, as DISTRIBUTION/TOOL.
    """
    if name is not None:
        _one(name, as_json)
        return
    found = describe()
    if as_json:
        show_json(found)
        return
    rows: list[tuple[object, ...]] = [
        (
            tool["reference"] or tool["name"],
            tool["status"],
            tool["error"] or tool["about"] or tool["factory"],
            f"{tool['distribution']} {tool['version']}",
        )
        for tool in found
    ]
    columns = ["tool", "status", "what it does", "distribution"]
    if any(tool["works_on"] for tool in found):
        columns.insert(2, "works on")
        rows = [
            (*row[:2], ", ".join(map(_short, tool["works_on"])) or "all", *row[2:])
            for row, tool in zip(rows, found, strict=True)
        ]
    table = Table("", columns, rows)
    show(table, sys.stdout, prose=("what it does",), drop=DROP)
    if not found:
        click.echo("No tool is installed: pip install amanda-tools", err=True)


def _short(namespace: str) -> str:
    """Return a pattern of namespaces without what matches anything.

    >>> _short("pytorch/*/eager")
    'pytorch eager'
    """
    return " ".join(part for part in namespace.split("/") if part != "*")


def describe() -> list[dict[str, Any]]:
    """Return a description of each installed tool; those that are not blocked are imported."""
    # Programs read the list, so it must not contain what a tool prints during its import.
    with redirect_stdout(sys.stderr), without_collection():
        references = tool_names.references()
        every = [found for _, found in references]
        return [_describe(reference, found, every) for reference, found in references]


def _describe(reference: str, found: Installed, every: Sequence[Installed]) -> dict[str, Any]:
    from amanda_core.config import factories

    status, error, fix, about = "ok", None, None, ""
    works_on: list[str] = []
    if found.blocked:
        status = "blocked"
    else:
        try:
            made = factories.factory(reference or found.name, every=every)
            works_on = [str(one) for one in getattr(made, "works_on", ())]
            # Not what a class inherits from `Tool`.
            if getattr(made, "__doc__", None):
                about = " ".join(_about(made).partition("\n\n")[0].split())
        except AmandaError as broken:
            status = "broken" if reference else "duplicate"
            error, fix = broken.what, broken.fix
    return {
        "name": found.name,
        "reference": reference,
        "status": status,
        "distribution": found.distribution,
        "version": found.version,
        "factory": found.value,
        "about": about,
        "works_on": works_on,
        "error": error,
        "fix": fix,
    }


def _one(name: str, as_json: bool) -> None:
    from amanda_core.config import factories

    with redirect_stdout(sys.stderr):
        made = factories.factory(name)
        options = [_option(option) for option in factories.options(made, name)]
        about = _about(made)
    if as_json:
        show_json({"name": name, "about": about, "options": options})
        return
    click.echo("\n".join(printable(line) for line in [name, "", *about.splitlines(), ""]))
    if not options:
        click.echo("It has no options.")
        return
    rows = [
        (
            option["name"],
            option["type"] or "(in code only)",
            "(required)" if option["required"] else option["default"],
        )
        for option in options
    ]
    show(Table("", ("option", "type", "default"), rows), sys.stdout, prose=("type", "default"))


def _option(option: Option) -> dict[str, Any]:
    return {
        "name": option.name,
        "type": option.expected or None,
        "required": option.required,
        "default": None if option.required else _plain(option.default),
    }


def _about(made: Callable[..., Any]) -> str:
    try:
        return inspect.getdoc(made) or ""
    except BaseException as error:
        contain(error)
        return f"(what it says of itself cannot be read: {described(error)})"


def _plain(default: Any) -> Any:
    if isinstance(default, Enum):
        return default.name
    if isinstance(default, (bool, int, float, str, type(None))):
        return default
    try:
        return str(default)
    except BaseException as error:
        contain(error)
        return f"({type(default).__name__})"
