"""`amanda doctor`: what in this environment would make results wrong or missing."""

from __future__ import annotations

import platform
import sys
from typing import Any

import click

from amanda_core import __version__, discovery
from amanda_core.cli.drawing import show, show_json
from amanda_core.cli.drivers import describe as describe_drivers
from amanda_core.cli.tools import describe as describe_tools
from amanda_core.driver import Finding
from amanda_core.errors import AmandaError
from amanda_core.installed import BLOCKING, blocked_names
from amanda_core.results import Table

__all__ = ["doctor"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
def doctor(as_json: bool) -> int:
    """Ask each driver what in this environment would make results wrong, and load each tool.

    The exit status is 1 if there is an error among the findings.
    """
    drivers, tools = describe_drivers(), describe_tools()
    found = [*_of_drivers(drivers), *_of_tools(tools), *_of_blocking([*drivers, *tools])]
    if as_json:
        show_json(
            {
                "amanda": __version__,
                "python": platform.python_version(),
                "drivers": drivers,
                "tools": tools,
                "findings": [
                    {
                        "of": of,
                        "severity": finding.severity,
                        "message": finding.message,
                        "fix": finding.fix,
                    }
                    for of, finding in found
                ],
            }
        )
    else:
        click.echo(
            f"amanda {__version__}, Python {platform.python_version()}, "
            f"{len(drivers)} drivers, {len(tools)} tools"
        )
        rows = [(f.severity, of, f.message, f.fix) for of, f in found]
        if rows:
            show(Table("", ("severity", "of", "finding", "fix"), rows), sys.stdout)
        else:
            click.echo("Nothing found that would make results wrong.")
    return int(any(finding.severity == "error" for _, finding in found))


def _of_drivers(drivers: list[dict[str, Any]]) -> list[tuple[str, Finding]]:
    found: list[tuple[str, Finding]] = []
    if not any(driver["status"] == "ok" for driver in drivers):
        fix = "pip install amanda-driver-<framework>"
        found.append(("amanda", Finding("error", "No working driver: no operator is seen", fix)))
    for driver in drivers:
        name = driver["name"]
        if driver["status"] == "broken":
            found.append((name, Finding("error", driver["error"])))
        if driver["status"] != "ok":
            continue
        plugin = discovery.driver(name).plugin
        try:
            findings = plugin.amanda_preflight() if hasattr(plugin, "amanda_preflight") else ()
            found += [(name, finding) for finding in findings]
        except Exception as error:
            message = f"Its preflight failed: {type(error).__name__}: {error}"
            found.append((name, Finding("error", message, "Reinstall or upgrade it")))
    return found


def _of_tools(tools: list[dict[str, Any]]) -> list[tuple[str, Finding]]:
    from amanda_core.config import factories

    found = []
    for name in dict.fromkeys(tool["name"] for tool in tools if tool["status"] != "blocked"):
        try:
            factories.factory(name)
        except AmandaError as error:
            found.append((name, Finding("error", error.what, error.fix)))
    return found


def _of_blocking(plugins: list[dict[str, Any]]) -> list[tuple[str, Finding]]:
    known = {plugin[key] for plugin in plugins for key in ("name", "distribution")}
    return [
        (BLOCKING, Finding("warning", f"{name!r} blocks nothing", "No plugin has this name"))
        for name in sorted(blocked_names() - known - {"*"})
    ]
