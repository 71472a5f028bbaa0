"""Charts of results, as data: what a report draws, for the ``charts`` of a result's JSON.

docs/guides/charts.md describes the kinds. A chart names a part of the JSON and fields of its rows,
so that no number is there twice.

>>> bars("Calls", [("type", "ops", "word|type")], measure("calls", "calls"))["kind"]
'bars'
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "Chart",
    "bars",
    "figure",
    "figures",
    "graph",
    "heat",
    "icicle",
    "lines",
    "measure",
    "points",
]

Chart = dict[str, Any]


def figure(
    label: str, value: float | str | None, unit: str = "", detail: str = "", op: str | None = None
) -> Chart:
    """Return one of the `figures`.

    Args:
        label: What the number is.
        value: The number, or a text.
        unit: Such as ``ns``, ``s`` or ``B``; ``%`` for a share of 1.
        detail: What else a reader should know of it.
        op: Name of the operator that it is about.
    """
    return {"label": label, "value": value, "unit": unit, "detail": detail, "op": op}


def figures(*items: Chart) -> Chart:
    """Return the numbers that matter most, for the top of a result's section."""
    return {"kind": "figures", "items": [item for item in items if item["value"] is not None]}


def measure(
    label: str,
    *values: str,
    unit: str | None = None,
    labels: Sequence[str] = (),
    lowest: bool = False,
) -> Chart:
    """Return one of the measures that a chart offers.

    Args:
        label: Its name.
        values: Fields of the rows, which are added up.
        unit: Their unit, if the result's ``units`` do not have it.
        labels: Names of the fields.
        lowest: Whether bars begin with the lowest rows, as for a quality.
    """
    found: Chart = {"label": label, "values": list(values)}
    given = _given(labels=list(labels), lowest=lowest)
    return found | ({"unit": unit} if unit is not None else {}) | given


def icicle(title: str, part: str, *measures: Chart, **more: Any) -> Chart:
    """Return a chart of operators by module, whose rows have ``name`` and ``module``."""
    return {"kind": "icicle", "title": title, "part": part, "measures": list(measures), **more}


def bars(title: str, by: Sequence[tuple[str, str, str]], *measures: Chart, **more: Any) -> Chart:
    """Return a chart of the largest rows.

    Args:
        title: Its title.
        by: ``(label, part, group)`` for each choice of rows. Rows with the same value in the field
            `group` are added up; an empty one leaves them single.
        measures: What the bars show.
        **more: Further settings of the chart.
    """
    parts = [{"label": label, "part": part, **_given(group=group)} for label, part, group in by]
    return {
        "kind": "bars",
        "title": title,
        "part": by[0][1],
        "by": parts,
        "measures": list(measures),
        **more,
    }


def lines(title: str, part: str, x: str, values: Sequence[str], **more: Any) -> Chart:
    """Return a chart of fields of rows over another field, such as the number of a step."""
    return {
        "kind": "lines",
        "title": title,
        "part": part,
        "x": x,
        "values": list(values),
        **more,
    }


def heat(title: str, part: str, row: str, column: str, value: tuple[str, str]) -> Chart:
    """Return a chart of shares of 1 as colours.

    Args:
        title: Its title.
        part: Part of the result.
        row: Field with the name of a row.
        column: Field with the name of a column.
        value: Fields with the part and the whole, which are added up in each cell.
    """
    return {
        "kind": "heat",
        "title": title,
        "part": part,
        "row": row,
        "column": column,
        "value": list(value),
    }


def points(title: str, part: str, value: str, **more: Any) -> Chart:
    """Return a chart of a number of each row, in the order of the rows."""
    return {"kind": "points", "title": title, "part": part, "value": value, **more}


def graph(title: str, part: str, **more: Any) -> Chart:
    """Return a canvas of graphs; the part has what `amanda_tools.graph` writes."""
    return {"kind": "graph", "title": title, "part": part, **more}


def _given(**settings: Any) -> Chart:
    return {name: value for name, value in settings.items() if value}
