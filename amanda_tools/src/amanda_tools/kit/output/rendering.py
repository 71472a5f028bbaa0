"""Rendering of results: numbers with unit prefixes, HTML for notebooks, data frames."""

from __future__ import annotations

import functools
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

from amanda_core.results import Result, Table
from amanda_tools.kit.output.extras import require
from amanda_tools.kit.output.inline_charts import charts_of

__all__ = [
    "Tabular",
    "dataframe",
    "describe_overhead",
    "fields_of",
    "format_count",
    "format_percent",
    "format_quantity",
    "render_html",
    "render_json",
    "render_result",
]


def format_quantity(number: int, unit: str) -> str:
    """Format a number with a prefix to its unit.

    >>> format_quantity(4_089_000_000, "MACs")
    '4.089 GMACs'
    """
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3f} {prefix}{unit}"
    return f"{number} {unit}"


def format_count(number: int, one: str, several: str = "") -> str:
    """Format a number of things, in the singular or plural.

    >>> format_count(1, "step"), format_count(2, "match", "matches")
    ('1 step', '2 matches')
    """
    return f"{number} {one if number == 1 else several or one + 's'}"


def format_percent(part: float, whole: float, digits: int = 1) -> str:
    """Format a part of a whole in percent; return an empty string if the whole is zero.

    >>> format_percent(1, 8)
    '12.5%'
    """
    return f"{part / whole:.{digits}%}" if whole else ""


def describe_overhead(what: str, tool_seconds: float, wall_seconds: float) -> list[str]:
    """Format a tool's share of the time for a title; return an empty list if no time was measured.

    >>> describe_overhead("counting", 0.5, 2.0)
    ['counting took 0.5 s of 2 s (25.0%)']
    """
    if not wall_seconds:
        return []
    part = format_percent(tool_seconds, wall_seconds)
    return [f"{what} took {tool_seconds:.3g} s of {wall_seconds:.3g} s ({part})"]


def fields_of(instance: Any) -> dict[str, Any]:
    """Return the fields of an instance of a dataclass, without a copy of their values.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Counted:
    ...     calls: int
    >>> fields_of(Counted(3))
    {'calls': 3}
    """
    # `dataclasses.asdict` copies every value deeply, which takes most of the time of a long result.
    return {name: getattr(instance, name) for name in _names(instance.__class__)}


def render_json(value: Any, levels: int = 2, margin: str = "\n") -> str:
    """Return JSON in which instances of dataclasses are objects.

    Args:
        value: What `json.dumps` accepts, with instances of dataclasses anywhere.
        levels: Of this many levels of lists and objects, each item is on a line of its own.
        margin: What comes between the lines.

    >>> print(render_json({"format": "my-tool/1", "times": [1, 2], "ops": [{"calls": 3}]}))
    {
     "format": "my-tool/1",
     "times": [1, 2],
     "ops": [
      {"calls": 3}
     ]
    }
    """
    is_object = isinstance(value, dict)
    items = value.values() if is_object else value if isinstance(value, list) else ()
    nested = (isinstance(item, (dict, list)) or is_dataclass(item) for item in items)
    if not levels or not any(nested):
        # Without `indent`, as otherwise the encoder is the slow one in Python.
        return _JSON.encode(value)
    parts = [render_json(item, levels - 1, f"{margin} ") for item in items]
    if is_object:
        parts = [f"{json.dumps(str(key))}: {p}" for key, p in zip(value, parts, strict=True)]
    before, after = "{}" if is_object else "[]"
    return f"{before}{margin} {f',{margin} '.join(parts)}{margin}{after}"


_JSON = json.JSONEncoder(default=fields_of, allow_nan=False)


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _plain(value: Any) -> Any:
    """Return a value with dictionaries for instances of dataclasses, also in lists."""
    if is_dataclass(value):
        return {name: _plain(part) for name, part in fields_of(value).items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def render_html(tables: Iterable[Table], result: Result | None = None) -> str:
    """Render tables as HTML, below the charts of a result.

    A title is the caption of the first table that has it.

    >>> render_html([Table("", ("op", "calls"), [("relu", 2)])])
    '<table><tr><th>op</th><th>calls</th></tr><tr><td>relu</td><td>2</td></tr></table>'
    """
    charts = charts_of(result) if result is not None else ""
    titles: set[str] = set()
    found = [charts] if charts else []
    for table in tables:
        found.append(_html(table, "" if table.title in titles else table.title))
        titles.add(table.title)
    return "\n".join(found)


def render_result(name: str, result: Result) -> str:
    """Return a result for a notebook: its charts and its table."""
    own = getattr(result, "_repr_html_", None)
    body = own() if own is not None else render_html([result.table()], result)
    return f"<h4>{html.escape(name)}</h4>{body}"


def dataframe(kind: type[Any], rows: Sequence[Any]) -> Any:
    """Return a `pandas.DataFrame` with one row for each instance of a dataclass; needs pandas.

    Args:
        kind: The dataclass. Its fields are the columns, even if there are no rows.
        rows: The instances.

    Raises:
        MissingExtraError: pandas is not installed.

    In a result::

        def to_dataframe(self) -> Any:
            return dataframe(TracedOp, self.ops)
    """
    pandas = require("pandas", "pandas")
    columns = [field.name for field in fields(kind)]
    cells = [[_plain(value) for value in fields_of(row).values()] for row in rows]
    return pandas.DataFrame(cells, columns=columns)


class Tabular:
    """A result with one table, whose main part is one list of records.

    Attributes:
        records: Name of the list, and the dataclass of what is in it.
    """

    records: ClassVar[tuple[str, type[Any]]]

    def table(self) -> Table:
        """Return the table."""
        raise NotImplementedError

    def to_dataframe(self) -> Any:
        """Return a `pandas.DataFrame` with one row for each record; needs pandas.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        name, kind = self.records
        return dataframe(kind, getattr(self, name))

    def _repr_html_(self) -> str:
        return render_html([self.table()])


def _html(table: Table, title: str) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    lines = [row(map(str, table.columns), "th"), *(row(cells, "td") for cells in table.text())]
    caption = f"<caption>{html.escape(title)}</caption>" if title else ""
    return f"<table>{caption}{''.join(lines)}</table>"
