"""`amanda drivers`: the installed drivers, where they come from, and what they can do."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import click

from amanda_core import discovery
from amanda_core.cli.drawing import show, show_json
from amanda_core.errors import AmandaError, AmandaWarning
from amanda_core.installed import DRIVER_GROUP, Installed, installed
from amanda_core.results import Table

__all__ = ["describe", "drivers"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
def drivers(as_json: bool) -> None:
    """List the installed drivers, which make Amanda speak to frameworks.

    Broken drivers are listed with what is wrong, those that AMANDA_DISABLE_PLUGINS (names with
    commas between, or *) blocks as blocked. No framework is imported.
    """
    found = describe()
    if as_json:
        show_json(found)
        return
    rows = [
        (
            driver["name"],
            driver["status"],
            f"{driver['distribution']} {driver['version']}",
            " ".join(driver["namespaces"]),
            driver["error"] or ", ".join(driver["capabilities"]),
        )
        for driver in found
    ]
    columns = ("driver", "status", "distribution", "namespaces", "capabilities")
    show(Table("", columns, rows), sys.stdout)
    if not found:
        click.echo("No driver is installed: pip install amanda-driver-<framework>", err=True)


def describe() -> list[dict[str, Any]]:
    """What is known of each installed driver."""
    with warnings.catch_warnings():
        # What it would say of broken ones stands in the list.
        warnings.simplefilter("ignore", AmandaWarning)
        discovery.plugin_manager()
    return [_describe(found) for found in installed(DRIVER_GROUP)]


def _describe(found: Installed) -> dict[str, Any]:
    status, error, info = "ok", None, None
    if found.blocked:
        status = "blocked"
    else:
        try:
            info = discovery.driver(found.name).info
        except AmandaError as broken:
            status, error = "broken", str(broken)
    return {
        "name": found.name,
        "status": status,
        "distribution": found.distribution,
        "version": found.version,
        "framework": info.name if info else None,
        "modules": list(info.modules) if info else [],
        "namespaces": list(info.namespaces) if info else [],
        "capabilities": sorted(info.capabilities) if info else [],
        "error": error,
    }
