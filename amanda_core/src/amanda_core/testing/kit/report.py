"""The summary of a run of the suite that a driver's author can publish.

Owns what is counted and its two forms: JSON for programs, a Markdown table for people.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from amanda_core.interface.driver import DRIVER_API
from amanda_core.testing.kit.capabilities import (
    CAPABILITIES,
    CORE,
    INTERRUPTIONS,
    OPERATORS,
    OPTIONAL,
)

__all__ = ["FORMAT", "Group", "Report", "Subject", "as_json", "as_markdown", "write"]

#: Name and version of the JSON.
FORMAT = "amanda-conformance/1"

_NEITHER = ("eager", "graph")  # These name modes, which have no tests.


@dataclass(frozen=True)
class Subject:
    """What was tested.

    Attributes:
        title: Driver and mode.
        driver: Name of the driver.
        distribution: Name and version of the distribution that it came from.
        declared: The capabilities that it declares.
        without: Capability -> why the mode lacks it.
        versions: Name -> version of the framework, and whatever else distinguishes runs.
    """

    title: str
    driver: str
    distribution: str
    declared: tuple[str, ...] = ()
    without: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Group:
    """Results of the tests of one capability, or of the core.

    Attributes:
        passed: Names of tests.
        failed: Test -> first line of its error.
        skipped: Test -> reason.
    """

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The verdict on the group, in one word."""
        if self.failed:
            return "failed"
        return "passed" if self.passed else "skipped"


@dataclass
class Report:
    """Results of one subject.

    Attributes:
        subject: What was tested.
        tests: Names of all tests of the suite, without parameters.
        namespaces: The namespaces that its contexts carried.
        groups: ``core``, ``more operators``, ``interruptions``, ``optional programs`` or a
            capability -> results.
    """

    subject: Subject
    tests: tuple[str, ...] = ()
    namespaces: list[str] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)

    def add(self, test: str, group: str, outcome: str, reason: str = "") -> None:
        """Count a test: ``passed``, ``failed`` or ``skipped``."""
        found = self.groups.setdefault(group, Group())
        if outcome == "skipped":
            found.skipped[test] = reason
        elif outcome == "failed" or test in found.failed:
            # A test that passed may still fail in its teardown.
            found.passed[:] = [name for name in found.passed if name != test]
            found.failed.setdefault(test, reason)
        elif test not in found.passed:
            found.passed.append(test)

    @property
    def missing(self) -> list[str]:
        """Tests of the suite that were not run."""
        ran = {
            name.partition("[")[0]
            for group in self.groups.values()
            for name in (*group.passed, *group.failed, *group.skipped)
        }
        return [name for name in self.tests if name not in ran]

    @property
    def fails(self) -> bool:
        """True if a test failed, or a core test was skipped."""
        core = self.groups.get(CORE, Group())
        return bool(core.skipped) or any(group.failed for group in self.groups.values())

    @property
    def conforms(self) -> bool:
        """True if all tests of the core and of declared capabilities ran and passed."""
        return not self.fails and not self.missing

    @property
    def conclusion(self) -> str:
        """The verdict in words."""
        if self.fails:
            return "does not conform"
        return f"ran without {len(self.missing)} tests" if self.missing else "conforms"

    def verdict(self, capability: str) -> str:
        """Return ``passed``, ``failed``, ``undeclared``, or why the mode lacks the capability."""
        if capability not in self.subject.declared:
            return "undeclared"
        if capability in self.subject.without:
            return f"not in this mode: {self.subject.without[capability]}"
        return self.groups[capability].verdict if capability in self.groups else "not run"


def _versions() -> dict[str, str]:
    from amanda_core import __version__

    return {
        "amanda-core": __version__,
        "driver API": str(DRIVER_API),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def as_json(reports: list[Report]) -> dict[str, Any]:
    """Return the reports as plain data; ``conforms`` is the verdict on all."""
    return {
        "format": FORMAT,
        "versions": _versions(),
        "conforms": all(report.conforms for report in reports),
        "backends": [
            {
                **asdict(report.subject),
                "namespaces": report.namespaces,
                "conforms": report.conforms,
                "not_run": report.missing,
                "capabilities": {
                    capability: report.verdict(capability)
                    for capability in CAPABILITIES
                    if capability not in _NEITHER
                },
                "tests": {name: asdict(group) for name, group in sorted(report.groups.items())},
            }
            for report in reports
        ],
    }


def as_markdown(reports: list[Report]) -> str:
    """Return a table with a column for each backend, followed by what failed or was skipped."""
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items())
    rows = [
        ["", *(report.subject.title for report in reports)],
        ["---"] * (len(reports) + 1),
        ["distribution", *(report.subject.distribution for report in reports)],
        ["versions", *(_pairs(report.subject.versions) for report in reports)],
        ["namespaces", *(", ".join(report.namespaces) for report in reports)],
        [CORE, *(_count(report, CORE) for report in reports)],
        [OPERATORS, *(_count(report, OPERATORS) for report in reports)],
        [INTERRUPTIONS, *(_count(report, INTERRUPTIONS) for report in reports)],
        [OPTIONAL, *(_count(report, OPTIONAL) for report in reports)],
    ]
    for capability in CAPABILITIES:
        if capability not in _NEITHER:
            cells = []
            for report in reports:
                verdict = report.verdict(capability)
                cells.append(
                    f"{verdict} ({_count(report, capability)})"
                    if capability in report.groups and verdict in ("passed", "failed")
                    else verdict
                )
            rows.append([f"`{capability}`", *cells])
    rows.append(["result", *(f"**{report.conclusion}**" for report in reports)])
    table = "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in rows)
    parts = ["# Conformance to Amanda's driver interface", versions, table]
    for report in reports:
        parts += _left_over(report)
    return "\n\n".join(parts) + "\n"


def _pairs(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _cell(text: str) -> str:
    """Return text that does not end its cell."""
    return " ".join(text.split()).replace("|", "\\|")


def _left_over(report: Report) -> list[str]:
    """Return lists of a backend's tests that did not pass."""
    groups = report.groups.values()
    lines = {
        "Failed": [_line(*item) for group in groups for item in group.failed.items()],
        "Skipped": [_line(*item) for group in groups for item in group.skipped.items()],
        "Not run": [_line(test) for test in report.missing],
    }
    return [
        f"## {title}: {report.subject.title}\n\n" + "\n".join(f"- {line}" for line in found)
        for title, found in lines.items()
        if found
    ]


def _line(test: str, reason: str = "") -> str:
    return f"`{test}`: {_cell(reason)}" if reason else f"`{test}`"


def _count(report: Report, name: str) -> str:
    group = report.groups.get(name, Group())
    total = len(group.passed) + len(group.failed)
    skipped = f", {len(group.skipped)} skipped" if group.skipped else ""
    return f"{len(group.passed)} of {total}{skipped}"


def write(reports: list[Report], path: Path) -> list[Path]:
    """Write JSON to `path` and Markdown beside it; return the files."""
    beside = path.with_suffix(".md")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(reports), indent=2) + "\n", encoding="utf-8")
    beside.write_text(as_markdown(reports), encoding="utf-8")
    return [path, beside]
