"""The page of a report, made of the results' JSON.

A result says which charts it has under ``charts``; docs/guides/charts.md lists their kinds. The
scripts in ``page/`` draw them, and show all else as tables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from amanda_tools.graph import html as graph
from amanda_tools.kit.page.composition import Parts, compose, part
from amanda_tools.kit.page.libraries import library

__all__ = ["LIMIT", "report"]

#: Largest result that a page contains, in bytes of JSON.
LIMIT = 1 << 25
#: Largest integer that JavaScript represents exactly.
_EXACT = 2**53
#: The scripts, in the order in which they take effect.
_SCRIPTS = (
    *("rows", "frame", "icicle", "bars", "lines", "heat", "points", "roofline", "figures"),
    *("tables", "details", "report"),
)


def report(
    results: Mapping[str, Any], title: str, lines: Sequence[str] = (), problem: str = ""
) -> str:
    """Return a page with these results, as HTML.

    Args:
        results: Name of each result -> the content of its JSON.
        title: What was run.
        lines: Further facts about the run.
        problem: How the run ended, if it did not end well.
    """
    facts = {"title": title, "lines": list(lines), "problem": problem}
    contents = {name: _fitting(_exact(content)) for name, content in results.items()}
    kinds = [chart.get("kind") for content in contents.values() for chart in _charts(content)]
    parts = graph.PARTS + _parts() if "graph" in kinds else _parts()
    body = part(__package__, "page/report.html")
    return compose(f"{title}: Amanda", body, parts, {"facts": facts, "results": contents})


@cache
def _parts() -> Parts:
    scripts = [part(__package__, f"page/{name}.js") for name in _SCRIPTS]
    return Parts((part(__package__, "page/report.css"),), (library("echarts"), *scripts))


def _charts(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the charts of a result, which anybody may have written."""
    found = content.get("charts")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _exact(value: Any) -> Any:
    """Return JSON in which integers that JavaScript would round are texts."""
    if isinstance(value, dict):
        return {name: _exact(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_exact(one) for one in value]
    if isinstance(value, int) and abs(value) > _EXACT:
        return str(value)
    return value


def _fitting(content: dict[str, Any]) -> dict[str, Any]:
    """Return a result without the parts that make it too large for a page."""
    sizes = {name: len(json.dumps(value)) for name, value in content.items()}
    given = content.get("notes")
    notes = given if isinstance(given, list) else []
    while sum(sizes.values()) > LIMIT:
        largest = max(sizes, key=lambda name: sizes[name])
        notes = [*notes, f"{largest} is too large for this page: {sizes.pop(largest)} bytes"]
        content = {name: value for name, value in content.items() if name != largest}
        content["charts"] = [one for one in _charts(content) if one.get("part") != largest]
    return {**content, "charts": _charts(content), "notes": notes}
