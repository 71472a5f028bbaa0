"""Results of the parts of the sweep, written to JSON and merged from shards."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import device

PACKAGES = (
    *("torch", "transformers", "tensorflow-cpu", "numpy", "amanda-core", "accelerate"),
    *("lightning", "keras", "tf-keras"),
)


@dataclasses.dataclass
class Failure:
    """One difference between a plain run and an instrumented one.

    Attributes:
        case: What ran: an operator and dtype, a model, a fault.
        how: How it was instrumented: sample, form, interceptor, routine, iteration.
        what: The facts that differ.
        reason: Why this is due to the framework and not to Amanda; empty if unexplained.
        times: Number of runs in which it was seen.
    """

    case: str
    how: str
    what: list[str]
    reason: str = ""
    times: int = 1


@dataclasses.dataclass
class Part:
    """Results of one part of the sweep, or of a shard of one.

    Attributes:
        name: Name of the part.
        counts: Numbers of what was run, by name.
        totals: Total numbers, including what was not run.
        cases: Number of comparisons of each case.
        failures: What differed, explained or not.
        refused: What Amanda refused with a named error -> how often.
        left_out: Case -> why it could not be compared at all.
        figures: Measurements by case, as text.
        options: Command-line options of the runs.
        runs: Case -> the day and the commit of its run, for parts whose cases are run again one by
            one.
        when: Start, in seconds since the epoch.
    """

    name: str
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    totals: dict[str, int] = dataclasses.field(default_factory=dict)
    cases: Counter[str] = dataclasses.field(default_factory=Counter)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    refused: Counter[str] = dataclasses.field(default_factory=Counter)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    figures: dict[str, str] = dataclasses.field(default_factory=dict)
    options: list[str] = dataclasses.field(default_factory=list)
    runs: dict[str, str] = dataclasses.field(default_factory=dict)
    when: float = dataclasses.field(default_factory=time.time)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def unexplained(self) -> list[Failure]:
        """Return the failures that no exception explains."""
        return [failure for failure in self.failures if not failure.reason]

    def write(self, path: Path) -> None:
        """Write the results as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # `asdict` would count the items of a Counter.
        found = {**vars(self), "failures": [vars(failure) for failure in self.failures]}
        path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def read(path: Path) -> Part:
    """Read results that `write` wrote."""
    found: dict[str, Any] = json.loads(path.read_text())
    for name in ("counts", "cases", "refused"):
        found[name] = Counter(found[name])
    found["failures"] = [Failure(**failure) for failure in found["failures"]]
    return Part(**found)


def merged(parts: Iterable[Part]) -> dict[str, Part]:
    """Merge parts with the same name, such as shards.

    If a case was run again, the results of the last run count.
    """
    whole: dict[str, Part] = {}
    for part in sorted(parts, key=lambda part: part.when):
        into = whole.setdefault(part.name, Part(part.name))
        again = {*part.cases, *part.left_out}
        into.failures = [f for f in into.failures if f.case not in again]
        into.counts += part.counts
        into.totals |= part.totals
        into.cases += part.cases
        into.refused += part.refused
        into.failures += part.failures
        into.left_out |= part.left_out
        into.figures |= part.figures
        into.runs |= part.runs
        into.options += [option for option in part.options if option not in into.options]
        into.versions |= part.versions
    return whole


def commit() -> str:
    """Return the short name of the commit whose sources run; empty outside of a checkout."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions of Python, the platform and the packages."""
    machine = f"{sys.platform} {platform.machine()}"
    found = {"Python": platform.python_version(), "platform": machine}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if device.name == "cuda":
        import torch

        found["device"] = torch.cuda.get_device_name()
    return found
