"""Run the reports and write docs/reports.md: `python -m maintenance.reports [NAME ...]`."""

from __future__ import annotations

import sys
from pathlib import Path

from maintenance.figures.__main__ import renew

from . import Outcome, Report, reports

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reports.md"
HEAD = """\
# What people report of other tools

Reports of users of profilers, counters, and libraries for pruning, quantization, interpretation
and fault injection, tried with Amanda. Each is a small program in
[maintenance/reports/programs](../maintenance/reports/programs); run the command there. What is
right is a closed form or what the framework itself says. A row that comes out wrong stays here as
wrong.

This page is written by `python -m maintenance.reports`; do not edit it.

"""


def main(names: list[str]) -> int:
    """Run all reports, or those of these names only; return how many come out wrong."""
    chosen = [one for one in reports() if not names or one.path.stem in names]
    outcomes = []
    for report in chosen:
        outcome = report.run()
        outcomes.append((report, outcome))
        print(f"{'right' if outcome.right else 'WRONG'}  {report.path.stem}: {outcome.shown}")
    if not names:
        PAGE.write_text(page(outcomes), "utf-8")
        renew()
    return sum(not outcome.right for _, outcome in outcomes)


def page(outcomes: list[tuple[Report, Outcome]]) -> str:
    """Return the text of the page."""
    right = sum(outcome.right for _, outcome in outcomes)
    lines = [f"{right} of {len(outcomes)} come out right.", ""]
    lines += ["| need | report | command | what comes out | |", "|---|---|---|---|---|"]
    for report, outcome in outcomes:
        source = "/".join(report.url.split("/")[3:5])
        number = report.url.rpartition("/")[2]
        verdict = "right" if outcome.right else f"**wrong**: right is `{report.right}`"
        cells = (
            report.need.replace("\n", " "),
            f"[{source} {number}]({report.url})",
            f"`{report.command}`",
            f"`{outcome.shown}`",
            verdict,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
