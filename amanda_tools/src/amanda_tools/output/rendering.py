"""How results are shown: numbers with prefixes, HTML for notebooks, data frames."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

from amanda_core.results import Table
from amanda_tools.output.extras import require

__all__ = ["counted", "dataframe", "html_of", "scaled", "share", "shares"]


def scaled(number: int, unit: str) -> str:
    """A number with a prefix of its unit.

    >>> scaled(4_089_000_000, "MACs")
    '4.089 GMACs'
    """
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3f} {prefix}{unit}"
    return f"{number} {unit}"


def counted(number: int, one: str, several: str = "") -> str:
    """A number of things.

    >>> counted(1, "step"), counted(2, "match", "matches")
    ('1 step', '2 matches')
    """
    return f"{number} {one if number == 1 else several or one + 's'}"


def share(part: float, whole: float) -> str:
    """A part in percent, for a cell; empty where there is no whole.

    >>> share(1, 8)
    '12.5%'
    """
    return f"{part / whole:.1%}" if whole else ""


def shares(what: str, tool_seconds: float, wall_seconds: float) -> list[str]:
    """Return what share of the time a tool took, for a title; nothing where no time is known.

    >>> shares("counting", 0.5, 2.0)
    ['counting took 0.5 s of 2 s (25.0%)']
    """
    if not wall_seconds:
        return []
    part = share(tool_seconds, wall_seconds)
    return [f"{what} took {tool_seconds:.3g} s of {wall_seconds:.3g} s ({part})"]


def html_of(tables: Iterable[Table]) -> str:
    """Tables as HTML, each with its title as caption."""
    return "\n".join(map(_html, tables))


def dataframe(kind: type[Any], rows: Sequence[Any]) -> Any:
    """One row for each instance of a dataclass, as a `pandas.DataFrame`; needs pandas.

    Args:
        kind: The dataclass, whose fields are the columns, also where there are no rows.
        rows: Its instances.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    pandas = require("pandas", "pandas")
    columns = [field.name for field in fields(kind)]
    return pandas.DataFrame([asdict(row) for row in rows], columns=columns)


def _html(table: Table) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    lines = [row(map(str, table.columns), "th"), *(row(cells, "td") for cells in table.text())]
    caption = html.escape(table.title)
    return f"<table><caption>{caption}</caption>{''.join(lines)}</table>"
