"""Reports of drivers about the environment, for the command line.

Owns the forms that findings and a `DriverStatus` must have. Like all answers of plugins, they are
checked before they are used.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from amanda_core.interface.driver import DriverStatus, Finding
from amanda_core.plugins.discovery import Driver, drivers
from amanda_core.runtime.containment import contain, described

__all__ = ["findings", "preflight", "set_environment", "status"]

_SEVERITIES = ("info", "warning", "error")


def preflight(found: Driver) -> list[Finding]:
    """Return a driver's findings about this environment; its failure is a finding, too."""
    try:
        return findings(found.call("amanda_preflight"))
    except BaseException as error:
        contain(error)
        message = f"Its preflight failed: {described(error)}"
        return [Finding("error", message, "Reinstall or upgrade it")]


def set_environment() -> None:
    """Set the variables that drivers declare for environments in which results would be wrong.

    Those that are set keep their values, and frameworks that are loaded have read theirs.
    """
    for driver in drivers():
        wanted = {} if driver.loaded else driver.info.environment
        if wanted and any(found.severity == "error" for found in preflight(driver)):
            for name, value in wanted.items():
                os.environ.setdefault(name, value)


def findings(answer: Any) -> list[Finding]:
    """Return the findings of a driver; a malformed one is a finding about the driver."""
    if answer is None:
        return []
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Iterable):
        return [_no_finding(answer)]
    return [found if _is_finding(found) else _no_finding(found) for found in answer]


def status(answer: Any) -> DriverStatus | None:
    """Return the status of a driver; None if it returned none, or a malformed one."""
    if not isinstance(answer, DriverStatus):
        return None
    version = "" if answer.version is None else answer.version
    texts = (answer.interceptor, answer.why, answer.refused, version)
    return answer if all(isinstance(text, str) for text in texts) else None


def _no_finding(answer: Any) -> Finding:
    kind = type(answer).__name__
    message = f"Its preflight returns a {kind} that is not a well-formed Finding"
    return Finding("error", message, "Correct its amanda_preflight, or upgrade it")


def _is_finding(found: Any) -> bool:
    return (
        isinstance(found, Finding)
        and found.severity in _SEVERITIES
        and isinstance(found.message, str)
        and isinstance(found.fix, str)
    )
