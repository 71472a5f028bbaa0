"""`amanda show`: a file of results, shown as tables.

Owns how the JSON of any tool is shown as tables. It does not know the tools, and reading does not
execute anything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from amanda_core import results
from amanda_core.cli.drawing import show as draw
from amanda_core.cli.drawing import show_json
from amanda_core.results import Table, printable

__all__ = ["show"]

#: Rows of a part that are shown without --all.
_ROWS = 20
#: Longest text of a value that is a list or an object.
_WIDTH = 60


@click.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("--part", help="Only this part of the file, such as ops or by_type.")
@click.option("--all", "everything", is_flag=True, help="All rows, and not the first 20 of a part.")
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
def show(file: Path, part: str | None, everything: bool, as_json: bool) -> None:
    """Show a file of results, FILE, that `amanda run -o` wrote; of a folder, all that are in it."""
    files = sorted(file.glob("*.json")) if file.is_dir() else [file]
    found = {path: results.load(path) for path in files}
    if file.is_dir():
        found = {path: content for path, content in found.items() if _is_result(content)}
        if not found:
            raise click.UsageError(f"There are no results in {str(file)!r}")
    for path, content in found.items():
        if not _is_result(content):
            raise click.UsageError(
                f"{str(path)!r} is not the result of a tool: it has no 'format'. Files that tools "
                "write beside their results are for the programs that their pages name. A tool of "
                "one's own puts a 'format' into what its to_json() gives, such as 'my-tool/1'"
            )
        if part is not None and part not in content:
            raise click.UsageError(
                f"{str(path)!r} has no part {part!r}; it has {', '.join(map(printable, content))}"
            )
    if as_json:
        parts = [content if part is None else content[part] for content in found.values()]
        show_json(parts if file.is_dir() else parts[0])
        return
    for number, (path, content) in enumerate(found.items()):
        click.echo(printable(f"{path.name}: {content['format']}"))
        for table in _tables(content, part):
            click.echo()
            draw(table if everything else table.first(_ROWS), sys.stdout)
            if not everything and len(table.rows) > _ROWS:
                click.echo(f"{len(table.rows) - _ROWS} more; --all shows them")
        if number + 1 < len(found):
            click.echo()


def _is_result(content: object) -> bool:
    return isinstance(content, dict) and isinstance(content.get("format"), str)


def _tables(content: Mapping[str, Any], part: str | None) -> Iterator[Table]:
    """Return a table of the single values, and one for each part that has several."""
    shown = {name: value for name, value in content.items() if part in (None, name)}
    single = [
        (name, value)
        for name, value in shown.items()
        if not isinstance(value, (list, dict)) and name != "format"
    ]
    if single:
        yield Table("", ("field", "value"), single)
    for name, value in shown.items():
        if isinstance(value, list) and value:
            yield _table(name, value)
        elif isinstance(value, dict) and value:
            yield _table(name, list(value.values()), list(value))


def _table(title: str, values: Sequence[Any], names: Sequence[str] | None = None) -> Table:
    """Return a table with a row for each value, which begins with its name if values have names."""
    columns: dict[str, None] = {}
    rows = [value if isinstance(value, dict) else {"value": value} for value in values]
    for row in rows:
        columns |= dict.fromkeys(row)
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
