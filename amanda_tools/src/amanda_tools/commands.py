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
from amanda_core.errors import AmandaError, MissingExtraError, ResultError
from amanda_core.results import printable

if TYPE_CHECKING:
    from amanda_tools.diff import DiffResult, FingerprintDiff
    from amanda_tools.diff.align import Align

__all__ = ["diff"]

#: Number of rows shown without --all.
_ROWS = 20


_DIFF = """Compare two runs, A and B, and name the operator at which they part.

A and B are folders of results of the tools `fingerprint` or `dump`, or folders that these tools
wrote themselves. Fingerprints are compared bit for bit, rank by rank. Dumps may be of different
frameworks, and are compared within a tolerance.

\b
Exit status:
    0  both have the same values, all equal or within the tolerance
    1  a value differs
    2  what both have agrees, but one has more, as after a crash; or they cannot be compared
    3  wrong use
"""


class _WrongUse(click.UsageError):
    exit_code = 3


class _Command(click.Command):
    """A command whose status 3, not 2, says that it was used wrongly."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            raise _WrongUse(error.message, error.ctx) from None


@click.command(cls=_Command, help=_DIFF)
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
    """Compare two runs; `_DIFF` says the rest."""
    try:
        with told_if_slow(lambda what: click.echo(f"amanda: {what}", err=True), "comparing"):
            found = _compared(a, b, rtol, atol, align)
    except AmandaError:
        raise
    except ImportError as error:
        raise MissingExtraError(str(error)) from error
    except ValueError as error:
        raise _WrongUse(str(error)) from error
    status = 1 if not found.same else 0 if found.complete else 2
    if as_json:
        show_json(json.loads(found.to_json()))
        return status
    table = found.table(everything)
    show(table if everything else table.first(_ROWS), sys.stdout)
    if not everything and len(table.rows) > _ROWS:
        click.echo(f"{len(table.rows) - _ROWS} more; --all shows them")
    for line in found.conclusion(None if everything else _ROWS).splitlines():
        click.echo(printable(line))
    return status


def _compared(
    a: Path, b: Path, rtol: float | None, atol: float | None, align: Align
) -> DiffResult | FingerprintDiff:
    """Compare the fingerprints of both runs if both have some, else their dumps."""
    from amanda_tools.diff import compare, compare_fingerprints, is_fingerprint

    kinds = [is_fingerprint(path) for path in (a, b)]
    if not any(kinds):
        return compare(a, b, rtol, atol, align)
    if not all(kinds):
        without = (a, b)[kinds.index(False)]
        raise ResultError(
            "One run has a fingerprint, the other has none",
            where=str(without),
            fix="Record both with the same tool: amanda run -t fingerprint",
        )
    if rtol or atol or align not in ("auto", "names"):
        raise _WrongUse(
            "Fingerprints are compared bit for bit and aligned by names: --rtol, --atol and "
            "--align are for dumps"
        )
    return compare_fingerprints(a, b)
