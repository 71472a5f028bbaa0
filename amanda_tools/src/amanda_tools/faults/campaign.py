"""Campaigns: many runs of a program under faults, their outcomes, and how sure their rates are."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from amanda_core.activation import apply
from amanda_core.results import Table
from amanda_tools.faults.tool import InjectFaults
from amanda_tools.output.folders import whole_file

__all__ = ["CampaignResult", "Trial", "run_campaign", "wilson_interval"]

#: `sdc`: silent data corruption, a changed top-1 prediction. `nan`: an output that is not finite.
#: `masked`: the predictions are what they were.
Outcome = Literal["masked", "sdc", "nan"]


@dataclass(frozen=True)
class Trial:
    """One run under faults.

    Attributes:
        run: Its number.
        outcome: The worst of its samples: `nan`, `sdc` or `masked`.
        faults: How many elements were changed.
        samples: How many predictions there are.
        changed: How many of them have another top-1 class, or an output that is not finite.
        distance: The largest difference of an output that is finite from that without faults.
    """

    run: int
    outcome: Outcome
    faults: int
    samples: int
    changed: int
    distance: float


@dataclass
class CampaignResult:
    """The trials of a campaign."""

    trials: list[Trial] = field(default_factory=list)

    def rate(self, outcome: Outcome) -> tuple[float, float, float]:
        """Return the share of trials with an outcome, and the ends of its 95% interval."""
        number = sum(trial.outcome == outcome for trial in self.trials)
        low, high = wilson_interval(number, len(self.trials))
        return number / max(len(self.trials), 1), low, high

    def table(self) -> Table:
        """Return a table with a row for each outcome."""
        outcomes: tuple[Outcome, ...] = ("masked", "sdc", "nan")
        rows = [
            (name, sum(t.outcome == name for t in self.trials), *map("{:.2%}".format, rate))
            for name in outcomes
            for rate in [self.rate(name)]
        ]
        columns = ("outcome", "trials", "share", "from", "to")
        return Table(f"{len(self.trials)} runs under faults", columns, rows)

    def write_csv(self, path: Path | str) -> Path:
        """Write a row for each trial."""
        path = Path(path)
        with whole_file(path) as new, open(new, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [one.name for one in fields(Trial)])
            writer.writeheader()
            writer.writerows(map(asdict, self.trials))
        return path


def run_campaign(tool: InjectFaults, program: Callable[[], Any], trials: int) -> CampaignResult:
    """Run a program without faults, and then under a tool again and again.

    Args:
        tool: Injects the faults. Its runs are numbered from 1. Run 0 has faults, but for the mode
            `per_run`, and does not count.
        program: Returns the outputs of a classifier: something that NumPy converts to an array of
            shape ``(samples, classes)``.
        trials: How many runs with faults.
    """
    import numpy as np

    expected = np.asarray(program()).astype(np.float64)
    classes = expected.argmax(axis=-1)
    found = CampaignResult()
    with apply(tool):
        if tool.mode == "per_run":
            tool.begin_run(0)
            program()
        for run in range(1, trials + 1):
            tool.begin_run(run)
            before = len(tool.faults)
            outputs = np.asarray(program()).astype(np.float64)
            finite = np.isfinite(outputs).all(axis=-1)
            other = ~finite | (np.nan_to_num(outputs).argmax(axis=-1) != classes)
            outcome: Outcome = "nan" if not finite.all() else "sdc" if other.any() else "masked"
            distance = np.abs(np.where(np.isfinite(outputs), outputs - expected, 0.0)).max()
            faults = len(tool.faults) - before
            found.trials.append(
                Trial(run, outcome, faults, other.size, int(other.sum()), float(distance))
            )
    return found


def wilson_interval(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the ends of Wilson's confidence interval of a rate (Wilson, 1927).

    >>> [round(end, 4) for end in wilson_interval(10, 100)]
    [0.0552, 0.1744]
    """
    if not trials:
        return 0.0, 1.0
    share = successes / trials
    scale = 1 + z * z / trials
    middle = (share + z * z / (2 * trials)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(middle - half, 0.0), min(middle + half, 1.0)
