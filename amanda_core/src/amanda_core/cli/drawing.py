"""Showing tables and JSON: drawn on a terminal, plain in a pipe.

Owns the late import of rich, which takes longer than a listing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any

import click

from amanda_core.cli.units import humanized
from amanda_core.results import Table, printable

__all__ = ["narrowed", "show", "show_json"]


def show(table: Table, stream: IO[str], units: Mapping[str, str] | None = None) -> None:
    """Write a table: drawn if `stream` is a terminal and rich is installed, else as text.

    Args:
        table: The table.
        stream: Where to.
        units: Heading -> unit of its numbers, for `humanized`.
    """
    table = humanized(table, units)
    if stream.isatty():
        try:
            _draw(table, stream)
        except ImportError:
            pass  # It is not installed, or the program has a module of that name.
        else:
            return
    click.echo(str(table), file=stream)


def show_json(value: Any) -> None:
    """Write JSON for programs to stdout; characters beyond ASCII are escaped."""
    click.echo(json.dumps(value, indent=2))


def _draw(table: Table, stream: IO[str]) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=stream)
    table, hidden = narrowed(table, console.width)
    # Not markup, because names come from other packages.
    drawn = RichTable(title=Text(printable(table.title)) if table.title else None)
    for index, column in enumerate(table.columns):
        justify: Any = "right" if table.is_right(index) else "left"
        drawn.add_column(Text(printable(column)), justify=justify, overflow="fold")
    for row in table.text():
        drawn.add_row(*(Text(cell) for cell in row))
    console.print(drawn)
    if hidden:
        named = printable(", ".join(hidden))
        click.echo(f"Not shown, as they do not fit: {named}", file=stream)


def narrowed(table: Table, width: int) -> tuple[Table, list[str]]:
    """Leave out columns until the others fit, so that names need not be wrapped.

    The first column stays. Texts go before numbers, and the last ones first.

    Args:
        table: The table.
        width: Characters in a line, including two of each column for its border.

    Returns:
        The table, and the headings of the columns that were left out.
    """
    cells = [[printable(column) for column in table.columns], *table.text()]
    widths = [max(len(row[i]) for row in cells) + 3 for i in range(len(table.columns))]
    kept = list(range(len(widths)))
    for numbers in (False, True):
        for index in reversed(range(1, len(widths))):
            if sum(widths[i] for i in kept) + 1 > width and table.is_right(index) == numbers:
                kept.remove(index)
    hidden = [str(table.columns[i]) for i in range(len(widths)) if i not in kept]
    rows = [[row[i] for i in kept] for row in table.rows]
    return Table(table.title, [table.columns[i] for i in kept], rows), hidden
