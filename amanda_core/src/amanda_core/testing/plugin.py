"""The pytest plugin: ``-p amanda_core.testing.plugin``.

Owns the options ``--amanda-backend`` and ``--amanda-report``, and collects the results of the suite
wherever it runs, by the labels of its fixtures.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from amanda_core.testing.kit.backend import Backend
from amanda_core.testing.kit.conformance import suite_tests
from amanda_core.testing.kit.fixtures import PROPERTY
from amanda_core.testing.kit.report import Report, Subject, write

__all__ = ["backends_of"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("amanda", "conformance of drivers of Amanda")
    group.addoption(
        "--amanda-backend",
        action="append",
        default=[],
        metavar="MODULE:NAME",
        help="a Backend, or its class, to run amanda_core.testing.suite over; may be repeated",
    )
    group.addoption(
        "--amanda-report",
        metavar="FILE",
        help="write a summary of the conformance suite to FILE (JSON) and beside it (Markdown)",
    )


def backends_of(config: pytest.Config) -> list[Backend]:
    """Return the backends named on the command line."""
    return [_load(name) for name in config.getoption("--amanda-backend")]


def _load(name: str) -> Backend:
    module, colon, attribute = name.partition(":")
    if not colon:
        raise pytest.UsageError(f"--amanda-backend={name}: write it as module:attribute")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"--amanda-backend={name}: {error}") from error
    if isinstance(found, type) and issubclass(found, Backend):
        return found()
    if isinstance(found, Backend):
        return found
    raise pytest.UsageError(f"--amanda-backend={name} is not an amanda_core.testing.Backend")


def _reason(report: pytest.TestReport) -> str:
    """Return in one line why a test was skipped or failed; empty if it is not known."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return next(iter(str(crash.message).splitlines()), "") if crash is not None else ""


class _Gathering:
    """The results so far, by subject."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.reports: dict[str, Report] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test that carries the suite's label."""
        for name, label in report.user_properties:
            if name != PROPERTY or not isinstance(label, dict):
                continue
            if report.when != "call" and report.outcome == "passed":
                continue
            subject = Subject(**label["subject"])
            kept = self.reports.setdefault(subject.title, Report(subject, tuple(suite_tests())))
            kept.namespaces[:] = sorted({*kept.namespaces, *label["namespaces"]})
            kept.add(label["test"], label["group"], report.outcome, _reason(report))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a line with the verdict on each backend, and write the report."""
        if not self.reports:
            return
        terminalreporter.section("conformance to Amanda's driver interface")
        for report in self.reports.values():
            counts = [
                f"{name} {len(group.passed)}/{len(group.passed) + len(group.failed)}"
                for name, group in sorted(report.groups.items())
                if group.passed or group.failed
            ]
            terminalreporter.line(
                f"{report.subject.title} {report.conclusion}: {', '.join(counts)}"
            )
        if self.path is not None:
            written = write(list(self.reports.values()), self.path)
            terminalreporter.line(f"Written: {', '.join(map(str, written))}")


def pytest_configure(config: pytest.Config) -> None:
    """Start collecting results."""
    path = config.getoption("--amanda-report")
    config.pluginmanager.register(_Gathering(Path(path) if path else None), "amanda-gathering")
