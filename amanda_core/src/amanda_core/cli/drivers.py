"""`amanda drivers`: the installed drivers, their distributions and their capabilities."""

from __future__ import annotations

import sys
import warnings
from contextlib import redirect_stdout
from typing import Any

import click

from amanda_core.cli.blocking import with_blocking
from amanda_core.cli.drawing import show, show_json
from amanda_core.errors import AmandaError, AmandaWarning
from amanda_core.interface.driver import DriverInfo, DriverStatus
from amanda_core.plugins import discovery, preflight
from amanda_core.plugins.installed import DRIVER_GROUP, Installed, installed
from amanda_core.results import Table
from amanda_core.runtime.containment import contain, described

__all__ = ["DROP", "describe", "drivers"]

#: Columns that are left out on a narrow terminal, the first ones first.
DROP = ("namespaces", "distribution")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
@with_blocking
def drivers(as_json: bool) -> None:
    """List the installed drivers, which make Amanda speak to frameworks.

    Broken drivers, and those that refuse the installed framework, are listed with what is wrong,
    and those that are disabled as blocked. No framework is imported.
    """
    found = describe()
    if as_json:
        show_json(found)
        return
    rows = [
        (
            driver["name"],
            driver["status"],
            driver["framework_version"] or "",
            " ".join(filter(None, (driver["interceptor"], driver["why"] and f"({driver['why']})"))),
            driver["error"] or ", ".join(driver["capabilities"]),
            " ".join(driver["namespaces"]),
            f"{driver['distribution']} {driver['version']}",
        )
        for driver in found
    ]
    columns = ["driver", "status", "version", "interceptor", "capabilities", "namespaces"]
    table = Table("", [*columns, "distribution"], rows)
    prose = ("interceptor", "capabilities")
    show(table, sys.stdout, prose=prose, drop=DROP)
    if not found:
        click.echo("No driver is installed: pip install amanda-driver-<framework>", err=True)


def describe() -> list[dict[str, Any]]:
    """Return a description of each installed driver."""
    # Programs read the list, so it must not contain what plugins print.
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):
        # The list itself reports broken ones.
        warnings.simplefilter("ignore", AmandaWarning)
        discovery.plugin_manager()
        return [_describe(found) for found in installed(DRIVER_GROUP)]


def _describe(found: Installed) -> dict[str, Any]:
    status, error, info, now = "ok", None, None, None
    if found.blocked:
        status = "blocked"
    else:
        try:
            driver = _driver_of(found)
            info, now = driver.info, _status(driver)
            if now is not None and now.refused:
                status, error = "refused", now.refused
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
        "capabilities": sorted(info.capabilities_in("")) if info else [],
        "by_mode": _by_mode(info) if info else {},
        "framework_version": now.version if now else None,
        "interceptor": now.interceptor if now else None,
        "why": now.why if now else None,
        "error": error,
    }


def _driver_of(found: Installed) -> discovery.Driver:
    """Return the driver of an entry point; raises as `discovery.driver` does."""
    known = discovery.driver(found.name)
    broken = discovery.plugins().broken
    if known.distribution != found.origin and found.name in broken:
        raise broken[found.name]
    return known


def _by_mode(info: DriverInfo) -> dict[str, list[str]]:
    """Return the capabilities of each mode."""
    modes = {pattern.rpartition("/")[2] for pattern in info.namespaces}
    if not isinstance(info.capabilities, frozenset):
        modes = set(info.capabilities)
    return {mode: sorted(info.capabilities_in(mode)) for mode in sorted(modes)}


def _status(found: discovery.Driver) -> DriverStatus | None:
    """Return a driver's status for the next `apply`; None if it does not report one."""
    try:
        return preflight.status(found.call("amanda_driver_status"))
    except BaseException as error:
        contain(error)
        return DriverStatus(None, "", f"It does not say: {described(error)}")
