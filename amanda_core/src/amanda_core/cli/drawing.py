"""Showing tables and JSON: drawn on a terminal, plain in a pipe.

Owns the late import of rich, which takes longer than a listing.
"""

from __future__ import annotations

import json
from typing import IO, Any

import click

from amanda_core.results import Table, printable

__all__ = ["show", "show_json"]


def show(table: Table, stream: IO[str]) -> None:
    """Write a table: drawn if `stream` is a terminal and rich is installed, else as text."""
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

    # Not markup, because names come from other packages.
    drawn = RichTable(title=Text(printable(table.title)) if table.title else None)
    for index, column in enumerate(table.columns):
        justify: Any = "right" if table.is_right(index) else "left"
        drawn.add_column(Text(printable(column)), justify=justify, overflow="fold")
    for row in table.text():
        drawn.add_row(*(Text(cell) for cell in row))
    Console(file=stream).print(drawn)
