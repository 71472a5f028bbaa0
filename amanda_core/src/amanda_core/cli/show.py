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
from pathlib import Path
from typing import Any

import click

from amanda_core import results
from amanda_core.cli.drawing import show as draw
from amanda_core.cli.drawing import show_json
from amanda_core.cli.reports import is_result, open_report
from amanda_core.cli.units import Quantity
from amanda_core.results import Table, printable

__all__ = ["show"]

#: Rows of a part that are shown without --all.
_ROWS = 20
#: What `--by` names -> part of a file.
_BY = {"module": "by_module", "type": "by_type", "op": "ops"}
#: Longest text of a value that is a list or an object.
_WIDTH = 60
#: Columns that tell programs which operator a row is about. People see them after the others.
_LAST = ("id", "namespace")


@click.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
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
@click.option("--open", "as_page", is_flag=True, help="As a page with charts, in the browser.")
def show(
    file: Path,
    part: str | None,
    by: str | None,
    depth: int | None,
    sort: str | None,
    top: int,
    everything: bool,
    as_csv: bool,
    as_json: bool,
    as_page: bool,
) -> None:
    """Show a file of results, FILE, that `amanda run -o` wrote; of a folder, all that are in it."""
    if by is not None and part is not None:
        raise click.UsageError("--part and --by exclude one another.")
    files = sorted(file.glob("*.json")) if file.is_dir() else [file]
    found = {path: results.load(path) for path in files}
    if file.is_dir():
        found = {path: content for path, content in found.items() if is_result(content)}
        if not found:
            raise click.UsageError(f"There are no results in {str(file)!r}")
    for path, content in found.items():
        if not is_result(content):
            raise click.UsageError(
                f"{str(path)!r} is not the result of a tool: it has no 'format'. Files that tools "
                "write beside their results are for the programs that their pages name. A tool of "
                "one's own puts a 'format' into what its to_json() gives, such as 'my-tool/1'"
            )
    if as_page:
        click.echo(open_report(list(found), file.resolve().name))
        return
    part = part if by is None else _BY[by]
    if by is not None and any(part in content for content in found.values()):
        found = {path: content for path, content in found.items() if part in content}
    for path, content in found.items():
        if part is not None and part not in content:
            raise click.UsageError(
                f"{str(path)!r} has no part {part!r}; it has {', '.join(map(printable, content))}"
            )
    if as_json:
        parts = [content if part is None else content[part] for content in found.values()]
        show_json(parts if file.is_dir() else parts[0])
        return
    tables = {
        path: [_chosen(table, depth, sort) for table in _tables(content, part)]
        for path, content in found.items()
    }
    if sort is not None and not any(sort in t.columns for shown in tables.values() for t in shown):
        every = [table for path in tables for table in tables[path]]
        columns = ", ".join(dict.fromkeys(str(c) for table in every for c in table.columns))
        raise click.UsageError(f"No column is {sort!r}; there are {columns}")
    if as_csv:
        _write_csv([table for shown in tables.values() for table in shown])
        return
    for number, (path, content) in enumerate(found.items()):
        click.echo(printable(f"{path.name}: {content['format']}"))
        for table in tables[path]:
            click.echo()
            shown = table if everything else table.first(top)
            draw(_readable(shown), sys.stdout, _units(content))
            if not everything and len(table.rows) > top:
                click.echo(f"{len(table.rows) - top} more; --all shows them")
        if number + 1 < len(found):
            click.echo()


def _chosen(table: Table, depth: int | None, sort: str | None) -> Table:
    """Return the rows that are to be shown, in their order."""
    rows = list(table.rows)
    if depth is not None and table.title == _BY["module"]:
        rows = [row for row in rows if len(re.split(r"[./]", str(row[0]))) <= depth]
    if sort is not None and sort in table.columns:
        column = list(table.columns).index(sort)
        numbers = [row for row in rows if isinstance(row[column], (int, float))]
        texts = [row for row in rows if not isinstance(row[column], (int, float))]
        rows = sorted(numbers, key=lambda row: row[column], reverse=True)  # type: ignore[arg-type,return-value]
        rows += sorted(texts, key=lambda row: str(row[column]))
    return Table(table.title, table.columns, rows)


def _readable(table: Table) -> Table:
    """Return a table for people: without columns that say nothing, what identifies rows last."""
    kept = [
        (str(column) in _LAST, index)
        for index, column in enumerate(table.columns)
        # The values of a single column are there to be read, also if all are 0.
        if len(table.columns) <= 2
        or index == 0
        or any(row[index] not in ("", 0, False, "[]", "{}") for row in table.rows)
    ]
    order = [index for _, index in sorted(kept)]
    rows = [[row[index] for index in order] for row in table.rows]
    if table.title == _BY["module"]:
        rows = [[row[0] or "(all)", *row[1:]] for row in rows]
    return Table(table.title, [table.columns[index] for index in order], rows)


def _quantity(content: Mapping[str, Any], name: str, value: Any, part: str = "") -> Any:
    units = _units(content)
    unit = units.get(name, units.get(f"{part}.*"))
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return Quantity(value, unit) if is_number and unit is not None else value


def _units(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the units of the columns, which a result gives by the names of its fields."""
    units = content.get("units")
    if not isinstance(units, dict):
        return {}
    return {str(name): unit for name, unit in units.items() if isinstance(unit, str)}


def _write_csv(tables: Sequence[Table]) -> None:
    if len(tables) != 1:
        named = ", ".join(table.title or "the single values" for table in tables)
        raise click.UsageError(f"--csv writes one part. Choose it with --part or --by: {named}")
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(tables[0].columns)
    writer.writerows(tables[0].rows)


def _tables(content: Mapping[str, Any], part: str | None) -> Iterator[Table]:
    """Return a table of the single values, and one for each part that has several."""
    shown = {name: value for name, value in content.items() if part in (None, name)}
    single = [
        (name, value)
        for name, value in shown.items()
        if not isinstance(value, (list, dict)) and name != "format"
    ]
    single = [(name, _quantity(content, name, value)) for name, value in single]
    if single:
        yield Table("", ("field", "value"), single)
    for name, value in shown.items():
        if name in ("units", "charts"):
            continue
        if isinstance(value, list) and value:
            yield _table(name, value)
        elif isinstance(value, dict) and value:
            values = [_quantity(content, key, one, name) for key, one in value.items()]
            yield _table(name, values, list(value))


def _table(title: str, values: Sequence[Any], names: Sequence[str] | None = None) -> Table:
    """Return a table with a row for each value, which begins with its name if values have names."""
    columns: dict[str, None] = {}
    rows = [value if isinstance(value, dict) else {"value": value} for value in values]
    for row in rows:
        columns |= dict.fromkeys(row)
    if names is None and "name" in columns:
        columns = {"name": None} | columns  # The first column stays on a narrow terminal.
    front = ["name"] if names is not None else []
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    if names is not None:
        cells = [[name, *row] for name, row in zip(names, cells, strict=True)]
    return Table(title, [*front, *columns], cells)


def _cell(value: Any) -> object:
    if not isinstance(value, (list, dict)):
        return "" if value is None else value
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
