"""Subcommands of `amanda` that read the results of these tools.

Defines their options and prints what they find. Only the program `amanda` imports this module,
because it needs click. The comparison itself is imported when the command runs, so that ``--help``
stays fast.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from amanda_core.cli.drawing import show, show_json
from amanda_core.cli.progress import told_if_slow
from amanda_core.cli.ranks import chosen, parse_ranks
from amanda_core.errors import AmandaError, MissingExtraError
from amanda_core.results import printable
from amanda_core.results.output import processes_in

if TYPE_CHECKING:
    from amanda_tools.diff.align import Align
    from amanda_tools.diff.comparison import DiffResult

__all__ = ["diff"]

#: Number of rows shown without --all.
_ROWS = 20


_DIFF = """Compare two dumps, A and B, and name the first operator at which they differ.

A and B are folders of results with a dump, or folders that the tool `dump` wrote itself. They
may be of different frameworks. Of two runs of several processes, each rank of A is compared with
that of B; what only one of them has is named first.

\b
Exit status:
    0  both have the same tensors, all within the tolerance
    1  a tensor is beyond the tolerance
    2  they cannot be compared
    3  what both have is within the tolerance, but one has more, as after a crash
"""


@click.command(help=_DIFF)
@click.argument("a", type=click.Path(exists=True, path_type=Path))
@click.argument("b", type=click.Path(exists=True, path_type=Path))
@click.option("--rtol", type=float, help="Relative tolerance; by dtype where it is left out.")
@click.option("--atol", type=float, help="Absolute tolerance; by dtype where it is left out.")
@click.option(
    "--align",
    type=click.Choice(["auto", "names", "values", "order"]),
    default="auto",
    help="Which operators correspond; by default names, if most are in both, and else values.",
)
@click.option("--ranks", metavar="0,3", help="Of runs of several processes, only these ranks.")
@click.option("--all", "everything", is_flag=True, help="Show what agrees as well, and all rows.")
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
def diff(
    a: Path,
    b: Path,
    rtol: float | None,
    atol: float | None,
    align: Align,
    ranks: str | None,
    everything: bool,
    as_json: bool,
) -> int:
    """Compare two dumps; `_DIFF` says the rest."""
    pairs, alone = _pairs(a, b, parse_ranks(ranks))
    if pairs is None:
        if ranks is not None:
            raise click.UsageError("--ranks is for two runs of several processes")
        found = _compared(a, b, rtol, atol, align)
        if as_json:
            show_json(json.loads(found.to_json()))
        else:
            _show(found, everything)
        return _status(found)
    for text in alone:
        click.echo(printable(text), err=as_json)
    statuses, contents, is_shown = [3] if alone else [0], {}, False
    for name, (mine, its) in pairs.items():
        found = _compared(mine, its, rtol, atol, align)
        statuses.append(_status(found))
        if as_json:
            contents[name] = json.loads(found.to_json())
        elif statuses[-1] == 1 and (everything or not is_shown):
            click.echo(f"{name}:")
            _show(found, everything)
            is_shown = True
        else:
            click.echo(printable(f"{name}: {found.conclusion}"))
    if as_json:
        show_json(contents)
    return 1 if 1 in statuses else max(statuses)


def _pairs(
    a: Path, b: Path, ranks: set[int] | None
) -> tuple[dict[str, tuple[Path, Path]] | None, list[str]]:
    """Return the processes that are in both runs, and sentences on those that are in one.

    The former is None unless both are runs of several processes.
    """
    in_a, in_b = (
        {one.name.partition("-restart")[0]: one for one in chosen(folder, ranks)}
        if folder.is_dir() and processes_in(folder)
        else {}
        for folder in (a, b)
    )
    if not in_a or not in_b:
        return None, []
    alone = [
        f"Only in {name}: {', '.join(left)}"
        for name, left in (
            ("A", [one for one in in_a if one not in in_b]),
            ("B", [one for one in in_b if one not in in_a]),
        )
        if left
    ]
    return {name: (path, in_b[name]) for name, path in in_a.items() if name in in_b}, alone


def _compared(a: Path, b: Path, rtol: float | None, atol: float | None, align: Align) -> DiffResult:
    from amanda_tools.diff import compare

    try:
        with told_if_slow(lambda what: click.echo(f"amanda: {what}", err=True), "comparing"):
            return compare(a, b, rtol, atol, align)
    except AmandaError:
        raise
    except ImportError as error:
        raise MissingExtraError(str(error)) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _status(found: DiffResult) -> int:
    return 1 if not found.same else 0 if found.complete else 3


def _show(found: DiffResult, everything: bool) -> None:
    table = found.table(everything)
    show(table if everything else table.first(_ROWS), sys.stdout)
    if not everything and len(table.rows) > _ROWS:
        click.echo(f"{len(table.rows) - _ROWS} more; --all shows them")
    for name, ops in (("A", found.unmatched_a), ("B", found.unmatched_b)):
        if ops:
            named = ", ".join(op.name for op in (ops if everything else ops[:_ROWS]))
            more = "" if everything or len(ops) <= _ROWS else f" and {len(ops) - _ROWS} more"
            click.echo(printable(f"Only in {name}: {named}{more}"))
    click.echo(printable(found.conclusion))
