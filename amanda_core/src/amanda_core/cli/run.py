"""`amanda run`: its flags, and the configuration, tools and output folder that they give."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from amanda_core import discovery
from amanda_core.cli.blocking import DISABLE_PLUGINS, block, use_only
from amanda_core.cli.drawing import show
from amanda_core.cli.program import Program
from amanda_core.cli.reports import ReportPage
from amanda_core.cli.running import Run
from amanda_core.config import Selecting, factories, from_flags, layers
from amanda_core.config.explanation import explain
from amanda_core.config.settings import merge
from amanda_core.config.text import parse_steps
from amanda_core.errors import AmandaError, ConfigError, OutputError
from amanda_core.folder_lock import claim
from amanda_core.output import LOCK, Output
from amanda_core.results import Table, printable

__all__ = ["divide", "run"]

#: Default folder of results. A number is added if it is taken.
_DEFAULT = "amanda_results"
_PROGRAM = "amanda.program"
#: Variables by which launchers tell their processes where to meet, so different for each launch.
_LAUNCHER = ("MASTER_ADDR", "MASTER_PORT")
#: Name of a file that says which launcher's processes use a folder without -o.
_LAUNCHED = ".amanda-launched"


_HELP = """Run a script or module under tools, without a change to it.

\b
    amanda run -t prune:sparsity=0.5 -t trace -o out train.py --epochs 1
    amanda run -t trace -m package.train --epochs 1

Everything after the script or module belongs to it. Which tools run, their options and the rest
may stand in the table [tool.amanda] of the nearest pyproject.toml in the script's folder or
above (the current one for -m); AMANDA_TOOLS ("prune:sparsity=0.5;trace"), AMANDA_OUTPUT and
AMANDA_DRIVERS come before it, and flags before those. What is disabled by any of them, or by
AMANDA_DISABLE_PLUGINS, is disabled.

Each tool's result is written to DIR/<name>.json, and its further files to DIR/<name>/, also
after an error, Ctrl-C, SIGTERM or SIGHUP; a summary goes to stderr. Started by a launcher that sets
RANK, each process has a folder of its own, DIR/rank0 and so on. The exit status is the
program's; 2 if Amanda could not start it, and 1 if the program ended well and results could not
be written.
"""


class _Command(click.Command):
    """A command whose own options end at the program's name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        valued = {
            name
            for parameter in self.params
            if isinstance(parameter, click.Option) and not parameter.is_flag
            for name in parameter.opts
        }
        head, ctx.meta[_PROGRAM] = divide(args, valued)
        return super().parse_args(ctx, head)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS]", "(SCRIPT | -m MODULE)", "[ARGS]..."]


def divide(arguments: Sequence[str], valued: set[str]) -> tuple[list[str], Program | None]:
    """Split a command line into our own options and the program with its arguments.

    Args:
        arguments: All that follows ``run``.
        valued: The options that take a value, such as ``-t``.

    >>> divide(["-t", "trace", "train.py", "-t", "1"], {"-t", "-m"})
    (['-t', 'trace'], Program(target='train.py', arguments=('-t', '1'), is_module=False))
    """
    index = 0
    while index < len(arguments):
        argument, rest = arguments[index], tuple(arguments[index + 1 :])
        head = list(arguments[:index])
        if argument == "--":
            return head, Program(rest[0], rest[1:]) if rest else None
        if argument == "-m" and rest:
            return head, Program(rest[0], rest[1:], is_module=True)
        if argument.startswith("-m") and len(argument) > 2:
            return head, Program(argument[2:], rest, is_module=True)
        if not argument.startswith("-"):
            return head, Program(argument, rest)
        index += 2 if argument in valued else 1
    return list(arguments), None


@click.command(cls=_Command, help=_HELP)
@click.option(
    "-t",
    "--tool",
    "tools",
    multiple=True,
    metavar="[ALIAS=]TOOL[:K=V,...]",
    help="A tool and its options; may be repeated. TOOL is an installed one (`amanda tools`), or "
    "module:Class or path/to/file.py:Class. Lists are written k=[a,b]. With -t, only the tools "
    "named so run; options that it leaves out are those of the configuration.",
)
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    help="Folder of results. Results of these tools that are there already are an error, unless "
    "--force is given, and so is another run that has not ended. "
    f"Without -o: {_DEFAULT}, or {_DEFAULT}-2 and so on where that has results already.",
)
@click.option("--force", is_flag=True, help="Replace the results of these tools in the folder.")
@click.option(
    "--html",
    metavar="FILE",
    help="Write all results with charts into one page, too, for a browser.",
)
@click.option("--drivers", metavar="A,B", help="The drivers that may attach; all by default.")
@DISABLE_PLUGINS
@click.option("--ops", multiple=True, metavar="GLOB", help="Only these ops; may be repeated.")
@click.option(
    "--modules", multiple=True, metavar="GLOB", help="Only ops in these modules; may be repeated."
)
@click.option("--steps", metavar="A:B", help="Only from step A up to and without B; also A:, ::N.")
@click.option(
    "--calls",
    metavar="A:B",
    help="Only calls A up to and without B of the outermost module in each step. Of generate, 0 "
    "is the prompt's.",
)
@click.option("--config", "file", metavar="FILE", help="Read [tool.amanda] of this file instead.")
@click.option("--no-config", is_flag=True, help="Read no file.")
@click.option(
    "--show-config",
    is_flag=True,
    help="Print which settings hold, and what says each: flag, variable, or file and line. Nothing "
    "is run; without a script, the configuration is that of the current folder.",
)
@click.option(
    "--keep-going",
    is_flag=True,
    help="Where a driver of Amanda itself fails at an operator, run that one plain and go on.",
)
@click.option("-q", "--quiet", is_flag=True, help="No summary on stderr.")
@click.option("-m", "_module", metavar="MODULE ...", help="Run a module, as python -m does.")
@click.pass_context
def run(
    context: click.Context,
    tools: tuple[str, ...],
    output: str | None,
    force: bool,
    html: str | None,
    drivers: str | None,
    disable_plugins: str | None,
    ops: tuple[str, ...],
    modules: tuple[str, ...],
    steps: str | None,
    calls: str | None,
    file: str | None,
    no_config: bool,
    show_config: bool,
    keep_going: bool,
    quiet: bool,
    _module: str | None,
) -> Run | int:
    """Run a program; `_HELP` says the rest."""
    program: Program | None = context.meta[_PROGRAM]
    if file and no_config:
        raise click.UsageError("--config and --no-config exclude one another.", context)
    select = Selecting(
        ops or None,
        modules or None,
        None,
        parse_steps(steps, "--steps") if steps is not None else None,
        parse_steps(calls, "--calls", "calls") if calls is not None else None,
        "--ops, --modules, --steps, --calls",
    )
    flags = from_flags(tools, output, drivers, select or None, disable_plugins)
    if program is None and not show_config:
        raise click.UsageError("Name a script, or a module with -m.", context)
    found = layers(
        program.folder if program is not None else Path.cwd(),
        flags,
        file=Path(file) if file else None,
        use_file=not no_config,
    )
    if program is None or show_config:
        click.echo(f"Configuration: {printable(found[0].path or 'no file')}")
        rows = explain(*found, output=f"{_DEFAULT} (a new folder)")
        show(Table("", ("setting", "value", "said by"), rows), sys.stdout)
        return 0
    if not program.is_module and not Path(program.target).exists():
        path = os.path.join(os.getcwd(), program.target)
        click.echo(f"amanda: can't open file {path!r}: No such file", err=True)
        return 2
    config = merge(*found)
    block(config.disabled)
    if not config.tools:
        raise ConfigError(
            "No tool is named",
            fix="Name one with -t TOOL, or in [tool.amanda.tools]; `amanda tools` lists them",
        )
    rank = _number("RANK")
    part = f"rank{rank}" if rank is not None else ""
    restarts = [_number(name) or 0 for name in os.environ if name.endswith("_RESTART_COUNT")]
    if part and any(restarts):
        part += f"-restart{max(restarts)}"  # Results of earlier runs are kept.
    names = [settings.name for settings in config.tools]
    processes = None
    if not part or part == "rank0":  # The first process removes what forced runs leave over.
        processes = (_number("WORLD_SIZE") or 1) if part else 0
    folder = (
        _reserved(config.output, names, part, force)
        if config.output is not None
        else _numbered(Path.cwd() / _DEFAULT, names, part, force)
    )
    try:
        page = ReportPage(Path(html), part, force=force) if html is not None else None
        program.enter()  # Before tools are imported: they may lie beside the script.
        if config.drivers is not None:
            try:
                use_only(config.drivers, config.where)
            except AmandaError as error:
                raise type(error)(error.what, where=config.where, fix=error.fix) from error
        discovery.announce(by_command=True)
        made = {settings.name: factories.make(settings) for settings in config.tools}
    except BaseException:
        folder.release()
        raise
    return Run(
        program,
        made,
        folder,
        processes,
        page,
        quiet=quiet,
        brief=bool(rank),
        keep_going=keep_going,
    )


def _reserved(folder: Path, names: Sequence[str], part: str, force: bool) -> Output:
    output = Output(folder, names, part=part, force=force)
    if not output.reserve():
        raise OutputError(
            f"{str(output.folder)!r} is the output folder of a run that has not ended",
            fix="Name another folder with -o. If there is no such run, as on file systems without "
            f"locks after it was killed, remove {LOCK} there",
        )
    return output


def _numbered(folder: Path, names: Sequence[str], part: str, force: bool) -> Output:
    number, chosen = 1, folder
    while True:
        if (force or _is_free(chosen, names, part)) and _is_ours(chosen, part):
            output = Output(chosen, names, part=part, force=force)
            if output.reserve():
                return output
        number += 1
        chosen = folder.with_name(f"{folder.name}-{number}")


def _is_free(folder: Path, names: Sequence[str], part: str) -> bool:
    """Return True if nothing of an earlier run is in a folder."""
    if part:  # All ranks of a run choose the same folder, where some may have written already.
        return not Output.taken(folder / part, names)
    return not folder.is_dir() or not any(folder.iterdir())


def _is_ours(folder: Path, part: str) -> bool:
    """Return False if the processes of another launcher, which may run now, use the folder."""
    launcher = " ".join(os.environ.get(name, "") for name in _LAUNCHER)
    if not part or not launcher.strip():
        return True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return claim(folder / _LAUNCHED, launcher)
    except OSError as error:
        raise OutputError(
            f"{str(folder)!r} cannot be written: {error.strerror}", fix="Name another with -o"
        ) from error


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if not text:
        return None
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise ConfigError(
            f"{variable} is {text[:80]!r}, which is not a number",
            where=variable,
            fix="Unset it if no launcher of several processes sets it",
        )
    return int(text)
