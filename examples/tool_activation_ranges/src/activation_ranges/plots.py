"""Charts of ranges, as PNG files.

Uses neither a display nor matplotlib's global state, so that it does not disturb a program that
draws charts of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from activation_ranges.result import Range

__all__ = ["draw_histograms", "draw_ranges"]

#: Maximum number of rows that stay readable; the table has all of them.
_ROWS = 60
_LETTERS = 40
#: Beyond these values a logarithmic axis cannot place its ticks.
_FARTHEST, _NEAREST = 1e30, 1e-30
_WHOLE, _MIDDLE = "#b9cfe4", "#2f6690"


def draw_ranges(ranges: Sequence[Range], path: Path) -> Path:
    """Draw each range as a bar from the smallest to the largest value, with the percentiles over
    it.

    If there are too many, only those that reach farthest from 0 are drawn, in their order.
    """
    farthest = sorted(range(len(ranges)), key=lambda place: -_reach(ranges[place]))
    shown = [ranges[place] for place in sorted(farthest[:_ROWS])]
    figure = Figure(figsize=(9, 1.6 + 0.22 * len(shown)), layout="constrained")
    axes: Any = figure.subplots()
    axes.use_sticky_edges = False
    for row, each in enumerate(shown):
        assert each.lowest is not None
        assert each.highest is not None
        low, high = _inside(each.lowest), _inside(each.highest)
        axes.barh(row, high - low, left=low, height=0.7, color=_WHOLE)
        inner = [_inside(value) for _, value in sorted(each.percentiles.items())]
        if len(inner) > 1:
            axes.barh(row, inner[-1] - inner[0], left=inner[0], height=0.35, color=_MIDDLE)
        if len(inner) % 2:
            axes.plot([inner[len(inner) // 2]], [row], marker="|", color="white", markersize=7)
    # Linear up to the smallest bar, so that every bar is visible.
    reaches = [min(max(_reach(each), _NEAREST), _FARTHEST) for each in shown]
    axes.set_xscale("symlog", linthresh=max(min(reaches), max(reaches) * 1e-6))
    axes.set_yticks(range(len(shown)), [_short(each.title) for each in shown], parse_math=False)
    axes.tick_params(labelsize=7)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.grid(axis="x", color="#dddddd")
    axes.set_axisbelow(True)
    several = f", {len(shown)} of {len(ranges)}" if len(shown) < len(ranges) else ""
    axes.set_title(f"Activation ranges{several}: all values, and between the percentiles")
    return _saved(figure, path)


def draw_histograms(ranges: Sequence[Range], count: int, path: Path) -> Path:
    """Draw the first `count` histograms, with logarithmic heights."""
    shown = [each for each in ranges if each.edges][:count]
    columns = min(4, max(1, len(shown)))
    lines = max(1, -(-len(shown) // columns))
    figure = Figure(figsize=(3 * columns, 2 * lines), layout="constrained")
    every: Any = figure.subplots(lines, columns, squeeze=False)
    for place, axes in enumerate(every.flat):
        if place >= len(shown):
            axes.set_axis_off()
            continue
        each = shown[place]
        edges = each.edges
        if edges[0] == edges[-1]:
            # Give the bar of a single value a width.
            edges = (edges[0] - 0.5, edges[0] + 0.5)
        axes.stairs(each.counts, edges, fill=True, color=_MIDDLE)
        axes.set_yscale("symlog", linthresh=1)
        axes.set_title(_short(each.title), fontsize=7, parse_math=False)
        axes.tick_params(labelsize=6)
    return _saved(figure, path)


def _reach(each: Range) -> float:
    assert each.lowest is not None
    assert each.highest is not None
    return max(abs(float(each.lowest)), abs(float(each.highest)))


def _inside(value: float) -> float:
    return max(-_FARTHEST, min(_FARTHEST, float(value)))


def _short(name: str) -> str:
    return name if len(name) <= _LETTERS else "…" + name[1 - _LETTERS :]


def _saved(figure: Figure, path: Path) -> Path:
    with warnings.catch_warnings():
        # Characters that the font lacks are drawn as boxes.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(path, dpi=120, format="png")
    return path
