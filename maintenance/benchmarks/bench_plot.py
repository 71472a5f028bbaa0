"""Draw the results as one figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

from .bench_growth import PLAIN
from .bench_results import Results

matplotlib.use("agg")

from matplotlib import pyplot

__all__ = ["draw"]

AMANDA, PEER = "tab:blue", "tab:gray"


def draw(results: Results, path: Path) -> None:
    """Draw the ratios of every program, growth, cache and memory."""
    runs = [
        (f"{subject}\n{run}", {way: timing.ratio for way, timing in compared.timings.items()})
        for subject, compareds in results.programs.items()
        for run, compared in compareds.items()
    ]
    rows = -(-len(runs) // 2) + 2
    figure, grid = pyplot.subplots(rows, 2, figsize=(15, 4.2 * rows), squeeze=False)
    axes = list(grid.flat)
    for axis, (title, ratios) in zip(axes, runs, strict=False):
        _bars(axis, title, ratios)
    rest = axes[-4:]
    for axis in axes[len(runs) : -4]:
        axis.set_visible(False)
    _operators(rest[0], results)
    _tools(rest[1], results)
    _caching(rest[2], results)
    _memory(rest[3], results)
    mode = " (quick run)" if results.mode == "quick" else ""
    machine = f"{results.machine['processor']}, one thread, torch {results.versions['torch']}"
    figure.suptitle(f"What instrumentation costs{mode}: {machine}")
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _bars(axis: Any, title: str, ratios: Mapping[str, float]) -> None:
    names = list(ratios)[::-1]
    colors = [AMANDA if name.startswith("amanda") else PEER for name in names]
    axis.barh(names, [ratios[name] for name in names], color=colors)
    for position, name in enumerate(names):
        axis.text(ratios[name], position, f" {ratios[name]:.3g}", va="center", fontsize=7)
    axis.set_xscale("log")
    axis.set_xlim(0.8, 2 * max(ratios.values()))
    axis.axvline(1, color="black", linewidth=0.8)
    axis.tick_params(labelsize=7)
    axis.set_title(f"{title}: ratio to plain torch", fontsize=9)


def _operators(axis: Any, results: Results) -> None:
    lengths = list(results.operators)
    names = list(next(iter(results.operators.values())).timings) if lengths else []
    for name in names[1:]:
        extra = [
            1e6 * (held.timings[name].cpu - held.timings[PLAIN].cpu) / length
            for length, held in results.operators.items()
        ]
        axis.plot(lengths, extra, marker="o", label=name)
    axis.set(
        xscale="log", xlabel="operators", ylabel="µs more for each", title="Number of operators"
    )
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7)


def _tools(axis: Any, results: Results) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for name, timing in (results.tools.timings if results.tools else {}).items():
        if name != PLAIN:
            way, _, kind = name.partition(": ")
            count, _, what = kind.partition(" ")
            lines.setdefault(f"{way}: tools {what}", []).append((int(count), timing.ratio))
    for name, points in lines.items():
        axis.plot(*zip(*points, strict=True), marker="o", label=name)
    axis.set(xlabel="tools", ylabel="ratio to plain torch", title="Number of tools (narrow BERT)")
    axis.legend(fontsize=7)


def _caching(axis: Any, results: Results) -> None:
    labels, ratios = [], []
    for subject, held in results.caching.items():
        for name, timing in held.timings.items():
            cached = name.removesuffix(", uncached") + ", cached"
            if name.endswith(", uncached") and cached in held.timings:
                short = name.removesuffix(", uncached").removeprefix("amanda ")
                labels.append(f"{subject.split(' (')[0]}\n{short}")
                ratios.append(timing.cpu / held.timings[cached].cpu)
    axis.barh(labels[::-1], ratios[::-1], color=AMANDA)
    for position, ratio in enumerate(ratios[::-1]):
        axis.text(ratio, position, f" {ratio:.3g}", va="center", fontsize=7)
    axis.tick_params(labelsize=7)
    axis.set_title("Uncached over cached (the paper's figure 12)", fontsize=9)


def _memory(axis: Any, results: Results) -> None:
    for name, seen in results.memory.items():
        mebibytes = [(size - seen.resident[0]) / 2**20 for size in seen.resident]
        axis.plot(seen.iterations, mebibytes, label=name)
    axis.set(xlabel="iterations", ylabel="MiB more than at first", title="Memory (resident)")
    axis.legend(fontsize=7)
