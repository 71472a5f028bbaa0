"""Charts of results as inline SVG, for the output of notebooks.

The same data as on a report page, at small size. Notebooks may drop scripts and style sheets, so
there are none. Text is escaped, and has the colour of the text around it.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amanda_core.results import Result

__all__ = ["charts_of", "render_charts"]

_WIDTH = 640
_BAR, _MOST = 16, 10
_HEIGHT = 120
#: Of Okabe and Ito, which the colour-blind tell apart.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999")


def charts_of(result: Result) -> str:
    """Return the charts of a result."""
    content = json.loads(result.to_json())
    return render_charts(content) if isinstance(content, dict) else ""


def render_charts(content: Mapping[str, Any]) -> str:
    """Return the charts of a result's JSON; those of other kinds are on a report page only."""
    found = []
    for chart in content.get("charts", ()):
        draw = _KINDS.get(chart.get("kind"))
        drawing = draw(chart, content) if draw is not None else ""
        if drawing:
            title = f"<figcaption>{_text(chart['title'])}</figcaption>"
            found.append(f"<figure>{title}{drawing}</figure>")
    return "\n".join(found)


def _bars(chart: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Draw the largest rows as horizontal bars, by the first choice and the first measure."""
    measure = chart["measures"][0]
    group = (chart.get("by") or [{}])[0].get("group")
    sums: dict[str, float] = {}
    for row in _rows(content, chart["part"]):
        value = sum(_number(row, field) for field in measure["values"])
        keys = (group or "name").split("|")
        name = next((str(row[key]) for key in keys if row.get(key)), "")
        sums[name] = sums.get(name, 0.0) + value
    largest = sorted((item for item in sums.items() if item[1]), key=lambda item: -item[1])[:_MOST]
    top = max((value for _, value in largest), default=0.0)
    if top <= 0:
        return ""
    unit = _unit(content, measure)
    lines = []
    for place, (name, value) in enumerate(largest):
        y = place * _BAR
        width = value / top * _WIDTH * 0.45
        lines.append(
            f'<rect x="0" y="{y + 2}" width="{width:.1f}" height="{_BAR - 4}" fill="{_COLORS[0]}"/>'
            f'<text x="{width + 6:.1f}" y="{y + 12}">{_text(name)} {_quantity(value, unit)}</text>'
        )
    return _svg(len(largest) * _BAR, lines, f"{measure['label']}: {chart['title']}")


def _icicle(chart: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Draw modules inside modules, as wide as their part of the first measure; three levels."""
    measure = chart["measures"][0]
    sums: dict[tuple[str, ...], float] = {}
    for row in _rows(content, chart["part"]):
        value = sum(_number(row, field) for field in measure["values"])
        path = tuple(str(row.get("module") or "").split("."))[:3]
        for depth in range(len(path) + 1):
            sums[path[:depth]] = sums.get(path[:depth], 0.0) + value
    whole = sums.get((), 0.0)
    if whole <= 0:
        return ""
    unit, lines = _unit(content, measure), []
    starts: dict[tuple[str, ...], float] = {(): 0.0}
    for path, value in sorted(sums.items(), key=lambda item: len(item[0])):
        if not path or value <= 0:
            continue
        start, width = starts[path[:-1]], value / whole * _WIDTH
        starts[path[:-1]], starts[path] = start + width, start
        y, color = (len(path) - 1) * (_BAR + 2), _COLORS[(len(starts)) % len(_COLORS)]
        label = path[-1] or "(no module)"
        shown = label[: max(0, int(width / 7) - 1)]
        tip = f"{'.'.join(path) or label}: {_quantity(value, unit)}"
        lines.append(
            f'<g><title>{_text(tip)}</title><rect x="{start:.1f}" y="{y}" width="{width:.1f}" '
            f'height="{_BAR}" fill="{color}" fill-opacity="0.35" stroke="{color}"/>'
            f'<text x="{start + 3:.1f}" y="{y + 12}">{_text(shown)}</text></g>'
        )
    depth = max(len(path) for path in sums)
    return _svg(depth * (_BAR + 2), lines, f"{measure['label']}: {chart['title']}")


def _lines(chart: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Draw fields of rows over another field."""
    if "values" not in chart:
        return ""  # Numbers in lists, by time, need the report page.
    rows = _rows(content, chart["part"])
    if len(rows) < 2:
        return ""
    series = [[_number(row, field) for row in rows] for field in chart["values"]]
    top = max(max(numbers) for numbers in series)
    if top <= 0:
        return ""
    labels = chart.get("labels") or chart["values"]
    unit = content.get("units", {}).get(chart["values"][0], "")
    step = _WIDTH / (len(rows) - 1)
    lines = []
    for number, values in enumerate(series):
        color = _COLORS[number % len(_COLORS)]
        points = " ".join(
            f"{place * step:.1f},{_HEIGHT - max(0.0, value) / top * (_HEIGHT - 20):.1f}"
            for place, value in enumerate(values)
        )
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
            f'<text x="{number * 150}" y="12" style="fill:{color}">{_text(labels[number])}</text>'
        )
    lines.append(f'<text x="{_WIDTH - 120}" y="12">to {_quantity(top, unit)}</text>')
    return _svg(_HEIGHT, lines, chart["title"])


_KINDS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], str]] = {
    "bars": _bars,
    "icicle": _icicle,
    "lines": _lines,
}


def _rows(content: Mapping[str, Any], part: str) -> Sequence[Mapping[str, Any]]:
    found = content.get(part, ())
    if isinstance(found, Mapping):
        return [{"name": name, **row} for name, row in found.items() if isinstance(row, Mapping)]
    return [row for row in found if isinstance(row, Mapping)]


def _number(row: Mapping[str, Any], field: str) -> float:
    found: Any = row
    for name in field.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, (int, float)) else 0.0


def _unit(content: Mapping[str, Any], measure: Mapping[str, Any]) -> str:
    return str(measure.get("unit") or content.get("units", {}).get(measure["values"][0], ""))


def _quantity(value: float, unit: str) -> str:
    if unit == "ns":
        return f"{value / 1e6:.4g} ms"
    for power, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= power:
            return _text(f"{value / power:.4g} {prefix}{unit}")
    return _text(f"{value:.4g} {unit}".strip())


def _svg(height: float, lines: Sequence[str], label: str) -> str:
    return (
        f'<svg role="img" aria-label="{_text(label)}" viewBox="0 0 {_WIDTH} {height:g}" '
        f'width="{_WIDTH}" height="{height:g}" style="font:11px sans-serif;fill:currentColor;'
        f'max-width:100%">{"".join(lines)}</svg>'
    )


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)
