"""Showing tables, sentences and JSON: drawn on a terminal, plain in a pipe.

Owns the late import of rich, which takes longer than a listing.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

import click

from amanda_core.cli.units import humanized
from amanda_core.results import Table, printable

__all__ = ["narrowed", "show", "show_json", "with_columns", "wrapped"]

#: The least width of a column of sentences, and of the only one for which declared columns go.
_SENTENCE, _ONLY = 20, 35
#: The longest text that is shown whole: a longer one would fill the screen.
_LONGEST = 500


def show(
    table: Table,
    stream: IO[str],
    units: Mapping[str, str] | None = None,
    *,
    prose: Collection[str] = (),
    drop: Sequence[str] = (),
) -> None:
    """Write a table: drawn if `stream` is a terminal and rich is installed, else as text.

    Args:
        table: The table.
        stream: Where to.
        units: Heading -> unit of its numbers, for `humanized`.
        prose: Headings of columns of sentences, which are wrapped where they do not fit.
        drop: Headings of the columns that are left out on a narrow terminal, the first ones first.
            By default, all but the first column may be, as `narrowed` orders them.
    """
    table = _shortened(humanized(table, units))
    if stream.isatty():
        # It is not installed, or the program has a module of that name.
        with suppress(ImportError):
            _draw(table, stream, prose, drop)
            return
    click.echo(str(table), file=stream)


def show_json(value: Any, limit: int | None = None) -> None:
    """Write JSON for programs to stdout; characters beyond ASCII are escaped.

    Args:
        value: What is written.
        limit: The largest number of elements of each list, and of each object with more entries
            than a record has; the key ``left_out`` says of which how many more there are.
    """
    if limit is not None:
        left_out: dict[str, int] = {}
        value = _limited(value, limit, "", left_out)
        if left_out:
            value = {**(value if isinstance(value, dict) else {"": value}), "left_out": left_out}
    click.echo(json.dumps(value, indent=2))


#: An object with at most as many entries is a record, of which none is left out.
_FIELDS = 24


def _limited(value: Any, limit: int, path: str, left_out: dict[str, int]) -> Any:
    if not isinstance(value, (list, dict)):
        return value
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
    most = limit if isinstance(value, list) else max(limit, _FIELDS)
    if len(pairs) > most and path:
        left_out[path] = len(pairs) - most
        del pairs[most:]
    found = {k: _limited(v, limit, f"{path}.{k}".lstrip("."), left_out) for k, v in pairs}
    return found if isinstance(value, dict) else list(found.values())


def _shortened(table: Table) -> Table:
    """Return a table in which the middle of very long texts is left out."""
    rows = [
        [
            f"{cell[: _LONGEST // 2]} [...] {cell[-_LONGEST // 2 :]}"
            if isinstance(cell, str) and len(cell) > _LONGEST
            else cell
            for cell in row
        ]
        for row in table.rows
    ]
    return Table(table.title, table.columns, rows)


def _draw(table: Table, stream: IO[str], prose: Collection[str], drop: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=stream)
    if not prose:  # A result. A listing has its columns also where nothing is in them.
        cells = table.text()
        said = [i for i in range(len(table.columns)) if not i or any(row[i] for row in cells)]
        table = with_columns(table, said)
    table, hidden = narrowed(table, console.width, prose, drop)
    # Not markup, because names come from other packages.
    drawn = RichTable()
    for index, column in enumerate(table.columns):
        justify: Any = "right" if table.is_right(index) else "left"
        # Only sentences share what is left of the width, unless even names do not fit.
        whole = bool(prose) and column not in prose
        heading = Text(printable(column))
        drawn.add_column(heading, justify=justify, overflow="fold", no_wrap=whole)
    for row in table.text():
        drawn.add_row(*(Text(cell) for cell in row))
    if table.title:
        # Not the table's own, which is as narrow as the table.
        click.echo(wrapped(printable(table.title), stream), file=stream)
    if table.rows:
        console.print(drawn)
    if hidden and table.rows:
        named = printable(", ".join(hidden))
        click.echo(wrapped(f"Not shown, as they do not fit: {named}", stream), file=stream)


def wrapped(text: str, stream: IO[str]) -> str:
    """Break a line between its words if `stream` is a terminal that is narrower."""
    # The program may have closed or replaced the stream, and a terminal may not know its width.
    with suppress(AttributeError, OSError, ValueError):
        if stream.isatty():
            width = os.environ.get("COLUMNS") or os.get_terminal_size(stream.fileno()).columns
            kept: Any = {"break_long_words": False, "break_on_hyphens": False}
            return textwrap.fill(text, int(width), subsequent_indent="  ", **kept)
    return text


def narrowed(
    table: Table, width: int, prose: Collection[str] = (), drop: Sequence[str] = ()
) -> tuple[Table, list[str]]:
    """Leave out columns until the others fit, so that names need not be wrapped.

    The first column stays. Without `drop`, names go before numbers, numbers before sentences, and
    of each kind the last ones first.

    Args:
        table: The table.
        width: Characters in a line, including two of each column for its border.
        prose: Headings of columns of sentences, which may be wrapped.
        drop: Headings of the columns that may be left out, the first ones first.

    Returns:
        The table, and the headings of the columns that were left out.
    """
    cells = [[printable(column) for column in table.columns], *table.text()]
    widths = [max(len(row[i]) for row in cells) + 3 for i in range(len(table.columns))]
    least = _ONLY if drop and len(prose) == 1 else _SENTENCE
    kinds = []
    for index, column in enumerate(table.columns):
        kinds.append(2 if column in prose else int(table.is_right(index)))
        if column in prose:
            widths[index] = min(widths[index], least + 3)
    columns = list(table.columns)
    order = [columns.index(column) for column in drop if column in columns] or [
        index
        for kind in range(3)
        for index in reversed(range(1, len(widths)))
        if kinds[index] == kind
    ]
    kept = list(range(len(widths)))
    for index in order:
        if sum(widths[i] for i in kept) + 1 > width:
            kept.remove(index)
    hidden = [str(table.columns[i]) for i in range(len(widths)) if i not in kept]
    return with_columns(table, kept), hidden


def with_columns(table: Table, indices: Sequence[int]) -> Table:
    """Return a table with only these columns, in this order."""
    rows = [[row[i] for i in indices] for row in table.rows]
    return Table(table.title, [table.columns[i] for i in indices], rows)
