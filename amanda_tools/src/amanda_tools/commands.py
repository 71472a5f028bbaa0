"""Subcommands of `amanda` that read the results of these tools.

Defines their options and prints what they find. Only the program `amanda` imports this module,
because it needs click. The comparison itself is imported when the command runs, so that ``--help``
stays fast.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from amanda_core.cli.drawing import show, show_json, wrapped
from amanda_core.cli.progress import told_if_slow
from amanda_core.cli.ranks import chosen, parse_ranks
from amanda_core.cli.reports import ReportPage
from amanda_core.errors import AmandaError, MissingExtraError, ResultError
from amanda_core.results import printable
from amanda_core.results.output import processes_in

if TYPE_CHECKING:
    from amanda_tools.diff import DiffResult, FingerprintDiff
    from amanda_tools.diff.align import Align
    from amanda_tools.diff.figures import FiguresDiff
    from amanda_tools.replicas import ReplicasReport

    _Found = DiffResult | FingerprintDiff | ReplicasReport | FiguresDiff

__all__ = ["diff", "replay"]

#: Number of rows shown without --all.
_ROWS = 20


_DIFF = """Compare two runs, A and B, and name the operator at which they part.

A and B are folders of results of the tools `fingerprint` or `dump`, or folders that these tools
wrote themselves. Fingerprints are compared bit for bit. Dumps may be of different frameworks, and
are compared within a tolerance; so are .npy, .npz, .safetensors and .pt files of any program, and
what transformers' debugger, SGLang's dumper and msProbe recorded. Of results without recorded
tensors, files or folders, the figures are compared: time, memory, FLOPs, zeros and whatever stands
at the top of a report. Of two runs of several processes, each rank of A is compared with that of B;
what only one of them has is named first. Without B, the processes of A are compared with one
another where they should be equal, by what the tool `replicas` has recorded.

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
@click.argument("b", type=click.Path(exists=True, path_type=Path), required=False)
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
@click.option(
    "--limit", type=click.IntRange(min=0), help="Of each list in --json, this many entries."
)
@click.option(
    "--html",
    "page",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Also write a page that shows where the runs differ, by module and step.",
)
@click.option("--force", is_flag=True, help="Replace FILE even if it is not such a page.")
@click.option(
    "--schema",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda context, option, value: _print_schema() if value else None,
    help="Print the JSON schema of what --json prints, and exit.",
)
def diff(
    a: Path,
    b: Path | None,
    rtol: float | None,
    atol: float | None,
    align: Align,
    ranks: str | None,
    everything: bool,
    as_json: bool,
    limit: int | None,
    page: Path | None,
    force: bool,
) -> int:
    """Compare two runs; `_DIFF` says the rest."""
    from amanda_tools.diff import compare, compare_fingerprints
    from amanda_tools.diff.figures import compare_figures, has_figures

    numbers = parse_ranks(ranks)
    shown = _Shown(a, b, None if page is None else ReportPage(page, force=force))
    if b is None:
        if rtol is not None or atol is not None or align != "auto":
            raise _WrongUse(
                "Processes of one run are compared bit for bit: --rtol, --atol and --align are for "
                "two runs"
            )
        return _processes(a, numbers, everything, as_json, limit, shown)
    is_exact = _have_fingerprints(a, b)
    if not is_exact and has_figures(a) and has_figures(b):
        if rtol is not None or atol is not None or align != "auto" or page:
            raise _WrongUse(
                "Figures are compared as they are: --rtol, --atol, --align and --html are for "
                "recorded tensors"
            )
        with _errors():
            return _tell(compare_figures(a, b, numbers), everything, as_json, limit, shown)
    pairs, alone = (None, []) if is_exact else _pairs(a, b, numbers)
    if is_exact and (rtol or atol or align not in ("auto", "names")):
        raise _WrongUse(
            "Fingerprints are compared bit for bit and aligned by names: --rtol, --atol and "
            "--align are for dumps"
        )
    if pairs is None:
        if ranks is not None and not is_exact:
            raise _WrongUse("--ranks is for two runs of several processes")
        found: _Found
        with _errors():
            if is_exact:
                found = compare_fingerprints(a, b, numbers)
            else:
                found = compare(a, b, rtol, atol, align)
        return _tell(found, everything, as_json, limit, shown)
    for text in alone:
        click.echo(printable(text), err=as_json)
    statuses, contents, is_shown = [2] if alone else [0], {}, False
    for name, (mine, its) in pairs.items():
        with _errors():
            found = compare(mine, its, rtol, atol, align)
        statuses.append(_status(found))
        shown.add(name, found)
        if as_json:
            contents[name] = json.loads(found.to_json())
        elif statuses[-1] == 1 and (everything or not is_shown):
            click.echo(f"{name}:")
            _show(found, everything)
            is_shown = True
        else:
            for line in found.conclusion(_ROWS).splitlines():
                click.echo(printable(f"{name}: {line}"))
    if as_json:
        show_json(contents, limit)
    shown.write(alone)
    return 1 if 1 in statuses else max(statuses)


class _Shown:
    """What a page shows of a comparison.

    Args:
        a: The first run.
        b: The second run, or None.
        page: The page; None if nobody asked for one.
    """

    def __init__(self, a: Path, b: Path | None, page: ReportPage | None) -> None:
        self._title = f"{a.name} and {b.name}" if b is not None else a.name
        self._page = page
        self._contents: dict[str, object] = {}
        self._lines: list[str] = []

    def add(self, name: str, found: _Found) -> None:
        """Add what was found; of several processes each has a name."""
        if self._page is not None:
            self._contents[name or "diff"] = json.loads(found.to_json())
            lines = found.conclusion(_ROWS).splitlines()
            self._lines += [f"{name}: {line}" if name else line for line in lines]

    def write(self, lines: Sequence[str] = ()) -> None:
        """Write the page.

        Args:
            lines: What could not be compared.
        """
        if self._page is not None:
            self._page.write_contents(self._contents, self._title, [*lines, *self._lines])
            click.echo(f"amanda: report: {self._page.path}", err=True)


def _print_schema() -> None:
    """Print the JSON schema of what `amanda diff --json` prints, and exit."""
    from importlib import resources

    click.echo(resources.files("amanda_tools.diff").joinpath("schema.json").read_text("utf-8"))
    raise SystemExit(0)


_REPLAY = """Execute one operator of a recorded run A again, from its recorded inputs.

A is the folder of results of the tool `dump`, recorded with `dump:calls=true`. The operator runs on
this machine, and where you ask for it on another device or with its inputs in another dtype. What
it returns is compared bit for bit with what was recorded; what differs is said by how much.

\b
Exit status:
    0  it returns the same, bit for bit
    1  it returns something else
    2  it cannot be executed again; the error says why
    3  wrong use
"""


@click.command(cls=_Command, help=_REPLAY)
@click.argument("a", type=click.Path(exists=True, path_type=Path))
@click.option("--op", required=True, metavar="NAME", help="Name of the operator.")
@click.option("--step", type=click.IntRange(min=0), default=0, help="The step; 0 by default.")
@click.option(
    "--execution",
    type=click.IntRange(min=0),
    help="Number of its earlier executions; the first in the step by default.",
)
@click.option("--device", default="", help="Where to execute it; in main memory by default.")
@click.option("--dtype", help="Convert floating-point inputs to this dtype first.")
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
def replay(
    a: Path,
    op: str,
    step: int,
    execution: int | None,
    device: str,
    dtype: str | None,
    as_json: bool,
) -> int:
    """Execute one operator again; `_REPLAY` says the rest."""
    from amanda_tools.replay import replay

    with _errors():
        found = replay(a, op, step, execution, device, dtype)
    if as_json:
        show_json(json.loads(found.to_json()), None)
    else:
        show(found.table(), sys.stdout)
        for line in found.conclusion().splitlines():
            click.echo(printable(line))
    return 0 if found.same else 1


def _processes(
    folder: Path,
    ranks: set[int] | None,
    everything: bool,
    as_json: bool,
    limit: int | None,
    shown: _Shown,
) -> int:
    """Compare the processes of one run.

    Raises:
        _WrongUse: The tool `replicas` was not applied.
    """
    from amanda_tools.replicas.verdict import compare_replicas, has_replicas

    if not has_replicas(folder):
        raise _WrongUse(
            f"{folder} has no record of the tool replicas, by which the processes of one run are "
            "compared. Name a second run, or record one: amanda run -t replicas"
        )
    with _errors():
        found = compare_replicas(folder, ranks)
    return _tell(found, everything, as_json, limit, shown)


def _tell(found: _Found, everything: bool, as_json: bool, limit: int | None, shown: _Shown) -> int:
    """Print what was found; return the exit status."""
    if as_json:
        show_json(json.loads(found.to_json()), limit)
    else:
        _show(found, everything)
    shown.add("", found)
    shown.write()
    return _status(found)


def _have_fingerprints(a: Path, b: Path) -> bool:
    """Return True if both runs have fingerprints.

    Raises:
        ResultError: Only one has.
    """
    from amanda_tools.diff import is_fingerprint

    kinds = [is_fingerprint(path) for path in (a, b)]
    if any(kinds) and not all(kinds):
        raise ResultError(
            "One run has a fingerprint, the other has none",
            where=str((a, b)[kinds.index(False)]),
            fix="Record both with the same tool: amanda run -t fingerprint",
        )
    return all(kinds)


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


@contextmanager
def _errors() -> Iterator[None]:
    """Say what happens if it is slow, and turn errors of a comparison into those of a program."""
    try:
        with told_if_slow(lambda what: click.echo(f"amanda: {what}", err=True), "comparing"):
            yield
    except AmandaError:
        raise
    except ImportError as error:
        raise MissingExtraError(str(error)) from error
    except ValueError as error:
        raise _WrongUse(str(error)) from error


def _status(found: _Found) -> int:
    return 1 if not found.same else 0 if found.complete else 2


def _show(found: _Found, everything: bool) -> None:
    table = found.table(everything)
    show(table if everything else table.first(_ROWS), sys.stdout)
    if not everything and len(table.rows) > _ROWS:
        click.echo(f"{len(table.rows) - _ROWS} more; --all shows them")
    for line in found.conclusion(None if everything else _ROWS).splitlines():
        # A command is copied.
        click.echo(
            printable(line) if "amanda run" in line else wrapped(printable(line), sys.stdout)
        )
