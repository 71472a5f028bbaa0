"""Campaigns: many runs of a program under faults, their outcomes, and how sure their rates are."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from amanda_core.engine.activation import apply
from amanda_core.errors import ToolError
from amanda_core.results import Table
from amanda_tools.faults.tool import InjectFaults
from amanda_tools.kit.output.folders import whole_file
from amanda_tools.kit.output.rendering import fields_of
from amanda_tools.kit.tensors.scores import scores_of

__all__ = ["CampaignResult", "Trial", "run_campaign", "wilson_interval"]

#: `sdc`: silent data corruption, a changed top-1 prediction. `nan`: an output that is not finite,
#: but was without faults.
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
            writer.writerows(map(fields_of, self.trials))
        return path


def run_campaign(tool: InjectFaults, program: Callable[[], Any], trials: int) -> CampaignResult:
    """Run a program without faults, and then under a tool again and again.

    Args:
        tool: Injects the faults. Its runs are numbered from 1. Run 0 has faults, but for the mode
            `per_run`, and does not count.
        program: Returns the outputs of a classifier, of shape ``(samples, classes)`` or that of one
            sample: a tensor of a framework, or something that NumPy converts to an array.
        trials: How many runs with faults.

    Raises:
        ValueError: `trials` is negative.
        ToolError: The program does not return the same kind of outputs each time, or runs no
            operator at which the tool injects faults.
    """
    if trials < 0:
        raise ValueError(f"trials must not be negative, but is {trials}")
    plain, expected = program(), None
    found = CampaignResult()
    with apply(tool):
        if tool.mode == "per_run":
            tool.begin_run(0)
            program()
        for run in range(1, trials + 1):
            tool.begin_run(run)
            before = len(tool.faults)
            outputs = program()
            if expected is None:
                if not tool.result().sites:
                    raise ToolError(
                        f"The program runs no operator of the types or names {', '.join(tool.ops)}",
                        where="run_campaign",
                        fix="Choose others by the option ops",
                    )
                # The tool knows the framework now.
                expected = scores_of(plain, tool.facts(), "run_campaign")
            changed = scores_of(outputs, tool.facts(), "run_campaign", expected)
            trial = _compared(expected, changed)
            found.trials.append(replace(trial, run=run, faults=len(tool.faults) - before))
    return found


def _compared(expected: Any, outputs: Any) -> Trial:
    """Return what outputs are in comparison with those without faults."""
    import numpy as np

    finite = np.isfinite(outputs)
    broken = (~finite & np.isfinite(expected)).any(axis=-1)
    classes, others = (np.nan_to_num(one).argmax(axis=-1) for one in (expected, outputs))
    changed = broken | (others != classes)
    with np.errstate(invalid="ignore"):
        distances = np.where(finite & np.isfinite(expected), np.abs(outputs - expected), 0.0)
    outcome: Outcome = "nan" if broken.any() else "sdc" if changed.any() else "masked"
    return Trial(0, outcome, 0, changed.size, int(changed.sum()), float(distances.max()))


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
