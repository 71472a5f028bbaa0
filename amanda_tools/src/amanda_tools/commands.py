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
from amanda_core.errors import AmandaError, MissingExtraError
from amanda_core.results import printable

if TYPE_CHECKING:
    from amanda_tools.diff.align import Align

__all__ = ["diff"]

#: Number of rows shown without --all.
_ROWS = 20


_DIFF = """Compare two dumps, A and B, and name the first operator at which they differ.

A and B are folders of results with a dump, or folders that the tool `dump` wrote itself. They
may be of different frameworks.

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
@click.option("--all", "everything", is_flag=True, help="Show what agrees as well, and all rows.")
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
def diff(
    a: Path,
    b: Path,
    rtol: float | None,
    atol: float | None,
    align: Align,
    everything: bool,
    as_json: bool,
) -> int:
    """Compare two dumps; `_DIFF` says the rest."""
    from amanda_tools.diff import compare

    try:
        with told_if_slow(lambda what: click.echo(f"amanda: {what}", err=True), "comparing"):
            found = compare(a, b, rtol, atol, align)
    except AmandaError:
        raise
    except ImportError as error:
        raise MissingExtraError(str(error)) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    status = 1 if not found.same else 0 if found.complete else 3
    if as_json:
        show_json(json.loads(found.to_json()))
        return status
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
    return status
