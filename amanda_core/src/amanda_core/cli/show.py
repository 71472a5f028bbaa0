"""`amanda show`: a file of results, shown as tables.

Owns how the JSON of any tool is shown as tables. It does not know the tools, and reading does not
execute anything.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import click

from amanda_core.cli.drawing import show as draw, show_json, with_columns
from amanda_core.cli.ranks import chosen, ends, merged, parse_ranks
from amanda_core.cli.reports import is_result, open_report
from amanda_core.cli.units import quantity
from amanda_core.results import Table, printable, tables as results

__all__ = ["show"]

#: Rows of a part that are shown without --all.
_ROWS = 20
#: What `--by` names -> part of a file.
_BY = {"module": "by_module", "type": "by_type", "op": "ops"}
#: Longest text of a value that is a list or an object.
_WIDTH = 60
#: How a formula of a spreadsheet begins.
_FORMULA = ("=", "+", "-", "@")
#: Columns that tell programs which operator a row is about. People see them after the others.
_LAST = ("id", "namespace")


@click.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("--ranks", metavar="0,3", help="Of a run of several processes, only these ranks.")
@click.option("--part", help="Only this part of the file, such as ops or by_type.")
@click.option(
    "--by", type=click.Choice(list(_BY)), help="Only the figures of each module, type or op."
)
@click.option("--depth", type=click.IntRange(min=1), help="Of modules, this many parts of a path.")
@click.option("--sort", metavar="COLUMN", help="The largest numbers of a column first.")
@click.option("--top", type=click.IntRange(min=0), default=_ROWS, help="Rows of a part.")
@click.option("--all", "everything", is_flag=True, help="All rows, and not the first 20 of a part.")
@click.option("--csv", "as_csv", is_flag=True, help="All rows of one part, as plain numbers.")
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
@click.option(
    "--limit", type=click.IntRange(min=0), help="Of each list in --json, this many entries."
)
@click.option("--open", "as_page", is_flag=True, help="As a page with charts, in the browser.")
def show(
    file: Path,
    ranks: str | None,
    part: str | None,
    by: str | None,
    depth: int | None,
    sort: str | None,
    top: int,
    everything: bool,
    as_csv: bool,
    as_json: bool,
    limit: int | None,
    as_page: bool,
) -> None:
    """Show a file of results, FILE, that `amanda run -o` wrote; of a folder, all that are in it.

    In the folder of a run of several processes, their results are shown as one.
    """
    if by is not None and part is not None:
        raise click.UsageError("--part and --by exclude one another.")
    parts = chosen(file, parse_ranks(ranks)) if file.is_dir() else []
    if ranks is not None and not parts:
        raise click.UsageError(f"{str(file)!r} is not the folder of a run of several processes")
    if ranks is not None and len(parts) == 1:
        file, parts = parts[0], []
    # First, because it says what the figures are of.
    for text in ends(file if file.is_dir() else file.parent, parts):
        click.echo(printable(text), err=as_csv or as_json or as_page)
    files = _read(file, parts, ranks is None or not parts)
    if as_page:
        contents = {one.path.stem: one.content for one in files}
        click.echo(open_report(contents, file.resolve().name))
        return
    if by is not None:
        part = _BY[by]
        files = [one for one in files if part in one.content] or files
    if as_json:
        values = [one.value(part) for one in files]
        show_json(values if file.is_dir() else values[0], limit)
        return
    tables = [[_chosen(table, depth, sort) for table in one.tables(part)] for one in files]
    every = list(chain.from_iterable(tables))
    if sort is not None:
        _check_column(sort, every)
    if as_csv:
        _write_csv(every)
        return
    for number, (one, of_file) in enumerate(zip(files, tables, strict=True)):
        if number:
            click.echo()
        one.draw(of_file, sys.maxsize if everything else top)


@dataclass(frozen=True, slots=True)
class _File:
    """A file of results.

    Attributes:
        path: The file.
        content: The whole content.
        process: The processes that wrote it; empty if there was only one.
    """

    path: Path
    content: Mapping[str, Any]
    process: str = ""

    def value(self, part: str | None) -> Any:
        """Return a part, which must be there, or the whole content."""
        if part is None:
            return self.content
        if part not in self.content:
            named = ", ".join(map(printable, self.content))
            raise click.UsageError(f"{str(self.path)!r} has no part {part!r}; it has {named}")
        return self.content[part]

    @property
    def units(self) -> dict[str, str]:
        """The units of the columns, which a result gives by the names of its fields."""
        units = self.content.get("units")
        if not isinstance(units, dict):
            return {}
        return {str(name): unit for name, unit in units.items() if isinstance(unit, str)}

    def tables(self, part: str | None) -> Iterator[Table]:
        """Yield a table of the single values, and one for each part that has several."""
        value, units = self.value(part), self.units
        shown = value if part is None else {part: value}
        several = {name: value for name, value in shown.items() if isinstance(value, (list, dict))}
        single = [
            (name, quantity(value, units.get(name, units.get(".*"))))
            for name, value in shown.items()
            if name not in several and name != "format"
        ]
        if single:
            yield Table("", ("field", "value"), single)
        for name, values in several.items():
            if not values or name in ("units", "charts", "merge"):
                continue
            if isinstance(values, list):
                yield _table(name, values)
            else:
                unit = units.get(f"{name}.*")
                named = [quantity(value, units.get(key, unit)) for key, value in values.items()]
                yield _table(name, named, list(values))

    def draw(self, tables: Sequence[Table], top: int) -> None:
        """Write tables for people, of each the first rows."""
        name = f"{self.process}/{self.path.name}" if self.process else self.path.name
        click.echo(printable(f"{name}: {self.content['format']}"))
        for table in tables:
            click.echo()
            draw(_readable(table.first(top)), sys.stdout, self.units)
            if len(table.rows) > top:
                click.echo(f"{len(table.rows) - top} more; --all shows them")


def _read(file: Path, parts: Sequence[Path], everything: bool) -> list[_File]:
    """Read a file of results, or those in a folder.

    Args:
        file: The file or folder.
        parts: The folders of the processes whose results become one.
        everything: Whether to read what is in the folder itself, too.

    Raises:
        click.UsageError: It is not one, or there are none.
    """
    if file.is_dir():
        own = sorted(file.glob("*.json")) if everything else []
        every = [_File(path, results.load(path)) for path in own]
        found = [one for one in every if is_result(one.content)]
        named = f"{len(parts)} processes" if len(parts) > 1 else "".join(p.name for p in parts)
        for name, content in merged(parts).items():
            found.append(_File(file / f"{name}.json", content, named))
        if not found:
            raise click.UsageError(f"There are no results in {str(file)!r}")
        return found
    content = results.load(file)
    if not is_result(content):
        raise click.UsageError(
            f"{str(file)!r} is not the result of a tool: it has no 'format'. Files that tools "
            "write beside their results are for the programs that their pages name. A tool of "
            "one's own puts a 'format' into what its to_json() gives, such as 'my-tool/1'"
        )
    return [_File(file, content)]


def _chosen(table: Table, depth: int | None, sort: str | None) -> Table:
    """Return the rows that are to be shown, in their order."""
    rows = list(table.rows)
    if depth is not None and table.title == _BY["module"]:
        rows = [row for row in rows if len(re.split(r"[./]", str(row[0]))) <= depth]
    if sort is not None and sort in table.columns:
        column = list(table.columns).index(sort)
        rows.sort(key=lambda row: _numbers_first(row[column]))
    return Table(table.title, table.columns, rows)


def _numbers_first(value: object) -> tuple[bool, float, str]:
    """Return a key that sorts numbers before texts, and the largest first."""
    return (False, -value, "") if isinstance(value, (int, float)) else (True, 0, str(value))


def _check_column(name: str, tables: Sequence[Table]) -> None:
    columns = [column for table in tables for column in table.columns]
    if name not in columns:
        named = ", ".join(dict.fromkeys(map(str, columns)))
        raise click.UsageError(f"No column is {name!r}; there are {named}")


def _readable(table: Table) -> Table:
    """Return a table for people: without columns that say nothing, what identifies rows last."""
    kept = [
        index
        for index in range(len(table.columns))
        # The values of a single column are there to be read, also if all are 0.
        if len(table.columns) <= 2
        or index == 0
        or any(row[index] not in ("", 0, False, "[]", "{}") for row in table.rows)
    ]
    table = with_columns(table, sorted(kept, key=lambda index: str(table.columns[index]) in _LAST))
    if table.title != _BY["module"]:
        return table
    return Table(table.title, table.columns, [[row[0] or "(all)", *row[1:]] for row in table.rows])


def _write_csv(tables: Sequence[Table]) -> None:
    if len(tables) != 1:
        named = ", ".join(table.title or "the single values" for table in tables)
        raise click.UsageError(f"--csv writes one part. Choose it with --part or --by: {named}")
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerows(map(_plain, [tables[0].columns, *tables[0].rows]))


def _plain(row: Sequence[object]) -> list[object]:
    """Return a row for a spreadsheet, which would run a text that begins like a formula."""
    cells = [printable(cell) if isinstance(cell, str) else cell for cell in row]
    return [
        f"'{cell}" if isinstance(cell, str) and cell[:1] in _FORMULA else cell for cell in cells
    ]


def _table(title: str, values: Sequence[Any], names: Sequence[str] | None = None) -> Table:
    """Return a table with a row for each value, which begins with its name if values have names."""
    rows = [value if value and isinstance(value, dict) else {"value": value} for value in values]
    columns = dict.fromkeys(column for row in rows for column in row)
    if names is None and "name" in columns:
        columns = {"name": None} | columns  # The first column stays on a narrow terminal.
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    if names is None:
        return Table(title, list(columns), cells)
    named = [[name, *row] for name, row in zip(names, cells, strict=True)]
    return Table(title, ["name", *columns], named)


def _cell(value: Any) -> object:
    if not isinstance(value, (list, dict)):
        return "" if value is None else value
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
