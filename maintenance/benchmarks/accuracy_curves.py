"""Draw what pruning, gates and memory budgets cost, and print the tables of their pages.

    python -m maintenance.benchmarks.accuracy_curves

Reads the rows of `docs/tools/curves`, which these commands write:

    python examples/pruning/prune_digits.py --seeds 5 --out docs/tools/curves/pruning.csv
    python examples/gating/gate_digits.py --seeds 5 --out docs/tools/curves/gates.csv
    python -m maintenance.benchmarks.rematerialization --out docs/tools/curves/rematerialize.csv
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

__all__ = ["TABLES", "draw"]

DOCS = Path(__file__).resolve().parents[2] / "docs" / "tools"
#: A row of a file.
Row = dict[str, str]

#: Page -> beginnings of the names of its tools in `pruning.csv`.
PRUNED = {"prune": ("global",), "prune-nm": ("3:4", "2:4", "1:4", "1:8"), "prune-tiles": ("tiles",)}
BLUE, ORANGE, GRAY, GREEN = "tab:blue", "tab:orange", "tab:gray", "tab:green"


def read(name: str) -> list[Row]:
    """Return the rows of a file."""
    with (DOCS / "curves" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def grouped(rows: Iterable[Row], key: str = "tool") -> dict[str, list[Row]]:
    """Return the rows by a column, in their order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return found


def mean(rows: Sequence[Row], column: str) -> tuple[float, float]:
    """Return the mean of a column and its standard deviation over the seeds."""
    values = [float(row[column]) for row in rows]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def shown(rows: Sequence[Row], column: str) -> str:
    """Return a mean and its spread as text."""
    return "{:.1f} ± {:.1f}".format(*mean(rows, column))


def of_page(page: str) -> dict[str, list[Row]]:
    """Return the rows of the tools of a page."""
    found = grouped(read("pruning"))
    return {name: rows for name, rows in found.items() if name.startswith(PRUNED[page])}


def pruning_table(page: str) -> str:
    """Return the table of a page of static pruning."""
    lines = ["| | zeros | pruned | two epochs later |", "|---|---|---|---|"]
    lines.append(f"| none, five epochs | | {shown(read('pruning'), 'dense')} | |")
    for name, rows in of_page(page).items():
        zeros = f"{100 * mean(rows, 'sparsity')[0]:.1f}%"
        lines.append(f"| {name} | {zeros} | {shown(rows, 'pruned')} | {shown(rows, 'tuned')} |")
    return "\n".join(lines)


def gates_table() -> str:
    """Return the table of the page of gates."""
    lines = ["| | accuracy | products of gated convolutions left |", "|---|---|---|"]
    for name, rows in grouped(read("gates")).items():
        lines.append(f"| {name} | {shown(rows, 'accuracy')} | {shown(rows, 'left')}% |")
    return "\n".join(lines)


def budgets_table() -> str:
    """Return the table of the page of budgets."""
    lines = [
        "| model | | budget | peak | work | operators that ran again | gradients as plain |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in read("rematerialize"):
        budget = "" if row["way"].startswith("torch") else f"{float(row['budget']):.0%}"
        again = row["repeated"] if budget else ""
        lines.append(
            f"| {row['model']} | {row['way']} | {budget} | {float(row['peak']):.0%} "
            f"| {float(row['work']):.2f} | {again} | {'yes' if row['equal'] == 'True' else 'no'} |"
        )
    return "\n".join(lines)


#: Page -> its table.
TABLES: dict[str, Callable[[], str]] = {
    **{page: partial(pruning_table, page) for page in PRUNED},
    "gating": gates_table,
    "rematerialize": budgets_table,
}


def draw() -> None:
    """Write a picture for each page."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    def picture(page: str, fill: Callable[[Any], None], x: str, y: str) -> None:
        figure, axis = pyplot.subplots(figsize=(7, 4))
        fill(axis)
        axis.set(xlabel=x, ylabel=y)
        axis.grid(alpha=0.3)
        axis.legend()
        figure.tight_layout()
        figure.savefig(DOCS / f"{page}-curve.png", dpi=90)
        pyplot.close(figure)

    def pruned(axis: Any, page: str) -> None:
        dense = mean(read("pruning"), "dense")[0]
        axis.axhline(dense, color=GRAY, linestyle="--", label="not pruned, five epochs")
        points = list(of_page(page).items())
        plain = [rows for name, rows in points if "SR-STE" not in name and "restored" not in name]
        for column, color, label in (
            ("pruned", ORANGE, "pruned"),
            ("tuned", BLUE, "two epochs later"),
        ):
            x = [100 * mean(rows, "sparsity")[0] for rows in plain]
            y, spread = zip(*(mean(rows, column) for rows in plain), strict=True)
            order = sorted(range(len(x)), key=x.__getitem__)
            ordered = ([values[n] for n in order] for values in (x, y, spread))
            xs, ys, spreads = ordered
            axis.errorbar(xs, ys, spreads, color=color, marker="o", capsize=3, label=label)
        for name, rows in points:
            if rows not in plain:
                at = 100 * mean(rows, "sparsity")[0]
                height, spread_of = mean(rows, "tuned")
                label = f"{name}, two epochs later"
                axis.errorbar(at, height, spread_of, color=GREEN, marker="s", label=label)

    for page in PRUNED:
        picture(page, partial(pruned, page=page), "zeros, %", "correct of 1,000 digits, %")

    def gated(axis: Any) -> None:
        rows = grouped(read("gates"))
        axis.axhline(
            mean(rows["without gates"], "accuracy")[0],
            color=GRAY,
            linestyle="--",
            label="without gates",
        )
        for kind, color in (("channels", ORANGE), ("positions", BLUE)):
            found = [one for name, one in rows.items() if name.startswith(kind)]
            x = [mean(one, "left")[0] for one in found]
            y, spread = zip(*(mean(one, "accuracy") for one in found), strict=True)
            axis.errorbar(x, y, spread, color=color, marker="o", capsize=3, label=f"prune_{kind}")

    left = "products of gated convolutions left, %"
    picture("gating", gated, left, "correct of 1,000 digits, %")

    def budgets(axis: Any) -> None:
        for (model, rows), color in zip(
            grouped(read("rematerialize"), "model").items(), (BLUE, ORANGE, GREEN), strict=True
        ):
            within = [row for row in rows if row["way"] == "rematerialize"]
            x, y = ([float(row[key]) for row in within] for key in ("budget", "work"))
            axis.plot([100 * one for one in x], y, color=color, marker="o", label=model)
            other = next(row for row in rows if row["way"].startswith("torch"))
            axis.plot(
                100 * float(other["peak"]),
                float(other["work"]),
                color=color,
                marker="*",
                markersize=14,
                linestyle="",
                label=f"{model}, torch.utils.checkpoint",
            )

    picture(
        "rematerialize", budgets, "budget, % of the plain peak", "work, in that of plain training"
    )


if __name__ == "__main__":
    draw()
    for page, table in TABLES.items():
        print(f"{page}:\n\n{table()}\n")
