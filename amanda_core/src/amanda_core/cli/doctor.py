"""`amanda doctor`: problems of this environment that would make results wrong or missing."""

from __future__ import annotations

import importlib
import platform
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Any

import click

from amanda_core import __version__
from amanda_core.cli import commands
from amanda_core.cli.blocking import with_blocking
from amanda_core.cli.drawing import show, show_json
from amanda_core.cli.drivers import describe as describe_drivers
from amanda_core.cli.tools import describe as describe_tools
from amanda_core.interface.driver import Finding
from amanda_core.plugins import discovery
from amanda_core.plugins.installed import (
    COMMAND_GROUP,
    PLUGIN_GROUP,
    blocked_names,
    canonical,
    installed,
    unreadable,
)
from amanda_core.plugins.preflight import preflight
from amanda_core.plugins.requirements import is_installed, missing
from amanda_core.results import Table
from amanda_core.runtime.containment import contain, described

__all__ = ["DROP", "doctor"]

#: Columns that are left out on a narrow terminal, the first ones first.
DROP = ("of", "severity")

_UPGRADE = "Reinstall or upgrade it"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
@click.option(
    "-i",
    "--import",
    "modules",
    multiple=True,
    metavar="MODULE",
    help="Import this first, such as a framework and what a program uses beside it, to see which "
    "hooks, modes and replaced functions it leaves behind; may be repeated.",
)
@with_blocking
def doctor(as_json: bool, modules: tuple[str, ...]) -> int:
    """Ask each driver what in this environment would make results wrong, and load each tool.

    The exit status is 1 if there is an error among the findings.
    """
    # Programs read the findings, so they must not contain what plugins print.
    with redirect_stdout(sys.stderr):
        found = _import(modules)
        drivers, tools = describe_drivers(), describe_tools()
        found += [*_of_process(), *_of_drivers(drivers)]
        broken = discovery.plugins().broken_plugins
        found += [(name, Finding("error", str(error))) for name, error in broken.items()]
        found += _of_tools(tools)
        found += [(name, Finding("error", why, _UPGRADE)) for name, why in commands.problems()]
        found += [*_of_blocking([*drivers, *tools]), *_of_distributions()]
        found += _of_requirements([*drivers, *tools])
    if as_json:
        show_json(
            {
                "amanda": __version__,
                "python": platform.python_version(),
                "drivers": drivers,
                "tools": tools,
                "findings": [{"of": of, **asdict(finding)} for of, finding in found],
            }
        )
    else:
        click.echo(
            f"amanda {__version__}, Python {platform.python_version()}, "
            f"drivers: {len(drivers)}, tools: {len(tools)}"
        )
        if found:
            rows = [(f.severity, of, f.message, f.fix) for of, f in found]
            table = Table("", ("severity", "of", "finding", "fix"), rows)
            show(table, sys.stdout, prose=("finding", "fix"), drop=DROP)
        else:
            click.echo("Nothing found that would make results wrong.")
    return int(any(finding.severity == "error" for _, finding in found))


def _of_drivers(drivers: list[dict[str, Any]]) -> list[tuple[str, Finding]]:
    found: list[tuple[str, Finding]] = []
    if not any(driver["status"] == "ok" for driver in drivers):
        fix = "pip install amanda-driver-<framework>"
        what = "No working driver: operators are not instrumented"
        found.append(("amanda", Finding("error", what, fix)))
    for driver in drivers:
        name = driver["name"]
        if driver["status"] == "broken":
            found.append((name, Finding("error", driver["error"])))
        if driver["status"] in ("ok", "refused"):  # Its findings say why it refuses.
            findings = preflight(discovery.driver(name))
            found += [(name, finding) for finding in findings]
    return found


def _of_process() -> list[tuple[str, Finding]]:
    """Return the names of what traces every line or call of Python in this process."""
    watching = {"sys.settrace": sys.gettrace(), "sys.setprofile": sys.getprofile()}
    named = [
        f"{where}: {getattr(found, '__module__', '?')}.{_name(found)}"
        for where, found in watching.items()
        if found is not None
    ]
    if sys.version_info >= (3, 12):
        tools = (sys.monitoring.get_tool(number) for number in range(6))
        named += [f"sys.monitoring: {tool}" for tool in tools if tool is not None]
    fix = "Times measured meanwhile are not the program's: leave it out to measure"
    return [("python", Finding("warning", f"Python is watched by {what}", fix)) for what in named]


def _name(found: object) -> str:
    return getattr(found, "__qualname__", None) or type(found).__qualname__


def _import(modules: tuple[str, ...]) -> list[tuple[str, Finding]]:
    found = []
    if modules:
        sys.path.insert(0, "")  # As under `python -m`: the program `amanda` is started without it.
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:
            contain(error)
            found.append((module, Finding("error", f"It cannot be imported: {described(error)}")))
    return found


def _of_tools(tools: list[dict[str, Any]]) -> list[tuple[str, Finding]]:
    found = []
    for tool in tools:
        reference = tool["reference"] or tool["name"]
        if tool["status"] in ("broken", "duplicate"):
            found.append((reference, Finding("error", tool["error"], tool["fix"])))
        elif tool["status"] == "ok" and reference != tool["name"]:
            message = f"Another tool is called {tool['name']!r}, too; this one is {reference!r}"
            found.append((reference, Finding("warning", message, f"-t {reference} names it")))
    return found


def _of_distributions() -> list[tuple[str, Finding]]:
    found = [
        ("python", Finding("error", f"Entry points cannot be read: {named}", "Reinstall it"))
        for named in unreadable()
    ]
    if is_installed("amanda"):
        message = (
            "The distribution 'amanda' is another project; its program `amanda` takes the place "
            "of ours, or ours of its own"
        )
        fix = "pip uninstall amanda, then pip install --force-reinstall --no-deps amanda-core"
        found.append(("amanda", Finding("warning", message, fix)))
    return found


def _of_requirements(plugins: list[dict[str, Any]]) -> list[tuple[str, Finding]]:
    names = [plugin["distribution"] for plugin in plugins if plugin["status"] != "blocked"]
    return [
        (
            found.of,
            Finding(
                "error",
                f"It requires {found.name}, which is not installed: what needs it ends with an "
                "error",
                f"pip install {found.requirement!r}",
            ),
        )
        for found in missing(filter(None, ["amanda-core", *names]))
    ]


def _of_blocking(plugins: list[dict[str, Any]]) -> list[tuple[str, Finding]]:
    known = {canonical(plugin[key]) for plugin in plugins for key in ("name", "distribution")}
    for group in (PLUGIN_GROUP, COMMAND_GROUP):
        known.update(canonical(n) for p in installed(group) for n in (p.name, p.distribution))
    return [
        (where, Finding("warning", f"{name!r} blocks nothing", "No plugin has this name"))
        for name, where in sorted(blocked_names().items())
        if canonical(name) not in known | {"*"}
    ]
