"""`amanda run`: its flags, and the configuration and tools that they give."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from amanda_core.cli.blocking import DISABLE_PLUGINS, block, use_only
from amanda_core.cli.children import disown, told
from amanda_core.cli.conditions import conditions
from amanda_core.cli.drawing import show
from amanda_core.cli.overview import PAGE, Overview, default_tools, find_overview
from amanda_core.cli.program import Program
from amanda_core.cli.reports import ReportPage
from amanda_core.cli.result_folder import DEFAULT, ResultFolder
from amanda_core.cli.running import Run
from amanda_core.config import Config, Layer, Selecting, factories, from_flags, layers
from amanda_core.config.explanation import explain
from amanda_core.config.settings import merge
from amanda_core.config.text import parse_steps
from amanda_core.engine.tool import Tool
from amanda_core.errors import ConfigError, MissingDriverError
from amanda_core.plugins import discovery
from amanda_core.plugins.framework_imports import announce
from amanda_core.processes.launched import Process
from amanda_core.results import Table, printable
from amanda_core.results.records import drop_records, keep_records_in

__all__ = ["Options", "divide", "made", "run"]

_PROGRAM = "amanda.program"

_HELP = """Run a script or module under tools, without a change to it.

\b
    amanda run train.py --epochs 1
    amanda run -t prune:sparsity=0.5 -t trace -o out train.py --epochs 1
    amanda run -t trace -m package.train --epochs 1

A command in Python, such as a launcher, is found as a shell finds it.

Without -t and without tools in a configuration, the run ends with an overview of time, memory and
compute. Everything after the script or module belongs to it. Which tools run, their options and
the rest may stand in the table [tool.amanda] of the nearest pyproject.toml in the script's folder
or above (the current one for -m); AMANDA_TOOLS ("prune:sparsity=0.5;trace"), AMANDA_OUTPUT and
AMANDA_DRIVERS come before it, and flags before those. What is disabled by any of them, or by
AMANDA_DISABLE_PLUGINS, is disabled.

Each tool's result is written to DIR/<name>.json, and its further files to DIR/<name>/, also
after an error, Ctrl-C, SIGTERM or SIGHUP; a summary goes to stderr. Started by a launcher that sets
RANK, or that of MPI or SLURM, each process has a folder of its own, DIR/rank0 and so on. The exit
status is the program's; 2 if Amanda could not start it, 1 if the program ended well and results
could not be written, and 4 if all went well and a condition of --fail-if holds.
"""


def _flag(*names: str, **attributes: Any) -> Any:
    """Declare a field whose value click reads from these flags."""
    return field(metadata={"names": names, "attributes": attributes})


@dataclass(frozen=True, slots=True)
class Options:
    """The values of the flags; the help of each says what it is."""

    tools: tuple[str, ...] = _flag(
        "-t",
        "--tool",
        multiple=True,
        metavar="[ALIAS=]TOOL[:K=V,...]",
        help="A tool and its options; may be repeated. TOOL is an installed one (`amanda tools`), "
        "or module:Class or path/to/file.py:Class. Lists are written k=[a,b]. With -t, only the "
        "tools named so run; options that it leaves out are those of the configuration.",
    )
    output: str | None = _flag(
        "-o",
        "--output",
        metavar="DIR",
        help="Folder of results. Results of these tools that are there already are an error, "
        "unless --force is given, and so is another run that has not ended. Without -o: the "
        f"folder of the configuration or {DEFAULT}; where that has results already, a number is "
        f"added, as {DEFAULT}-2.",
    )
    force: bool = _flag(
        "--force", is_flag=True, help="Replace the results of these tools in the folder."
    )
    html: str | None = _flag(
        "--html",
        metavar="FILE",
        help="Write all results with charts into one page, too, for a browser.",
    )
    drivers: str | None = _flag(
        "--drivers", metavar="A,B", help="The drivers that may attach; all by default."
    )
    disable_plugins: str | None = _flag("--disable-plugins", **DISABLE_PLUGINS)
    ops: tuple[str, ...] = _flag(
        "--ops", multiple=True, metavar="GLOB", help="Only these ops; may be repeated."
    )
    modules: tuple[str, ...] = _flag(
        "--modules",
        multiple=True,
        metavar="GLOB",
        help="Only ops in these modules; may be repeated.",
    )
    steps: str | None = _flag(
        "--steps", metavar="A:B", help="Only from step A up to and without B; also A:, ::N."
    )
    calls: str | None = _flag(
        "--calls",
        metavar="A:B",
        help="Only calls A up to and without B of the outermost module in each step. Of generate, "
        "0 is the prompt's.",
    )
    file: str | None = _flag(
        "--config", metavar="FILE", help="Read [tool.amanda] of this file instead."
    )
    no_config: bool = _flag("--no-config", is_flag=True, help="Read no file.")
    show_config: bool = _flag(
        "--show-config",
        is_flag=True,
        help="Print which settings hold, and what says each: flag, variable, or file and line. "
        "Nothing is run; without a script, the configuration is that of the current folder.",
    )
    keep_going: bool = _flag(
        "--keep-going",
        is_flag=True,
        help="Where a driver of Amanda itself fails at an operator, run that one plain and go on.",
    )
    fail_if: tuple[str, ...] = _flag(
        "--fail-if",
        multiple=True,
        metavar="CONDITION",
        help="End with status 4 if this holds of the results, such as 'flops.total > 2e9' or "
        "'latency.step_median > 20ms'; may be repeated.",
    )
    no_children: bool = _flag(
        "--no-children",
        is_flag=True,
        help="Run Python programs that the program starts without tools.",
    )
    quiet: bool = _flag("-q", "--quiet", is_flag=True, help="No summary on stderr.")

    def layer(self) -> Layer:
        """Return the settings of the flags.

        Raises:
            ConfigError: A flag is malformed.
        """
        select = Selecting(
            self.ops or None,
            self.modules or None,
            None,
            parse_steps(self.steps, "--steps") if self.steps is not None else None,
            parse_steps(self.calls, "--calls", "calls") if self.calls is not None else None,
            "--ops, --modules, --steps, --calls",
        )
        return from_flags(self.tools, self.output, self.drivers, select, self.disable_plugins)


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


_FLAGS: list[click.Parameter] = [
    click.Option([*flag.metadata["names"], flag.name], **flag.metadata["attributes"])
    for flag in fields(Options)
]


@click.command(cls=_Command, help=_HELP, params=_FLAGS)
@click.option("-m", "module", metavar="MODULE ...", help="Run a module, as python -m does.")
@click.pass_context
def run(context: click.Context, /, module: None, **given: Any) -> Run | int:
    """Run a program; `_HELP` says the rest."""
    options = Options(**given)
    program: Program | None = context.meta[_PROGRAM]
    if options.file and options.no_config:
        raise click.UsageError("--config and --no-config exclude one another.", context)
    if program is None and not options.show_config:
        raise click.UsageError("Name a script, or a module with -m.", context)
    there = program.found() if program is not None else None
    found = _layers(there or program, options)
    if program is None or options.show_config:
        click.echo(f"Configuration: {printable(found[0].path or 'no file')}")
        rows = explain(*found, output=f"{DEFAULT} (a new folder)")
        table = Table("", ("setting", "value", "said by"), rows)
        show(table, sys.stdout, prose=("value", "said by"))
        return 0
    if there is None:
        path = os.path.join(os.getcwd(), program.target)
        text = f"amanda: can't open file {path!r}: No such file"
        if shutil.which(program.target):
            text += (
                f". The command {program.target!r} is not Python's: if it starts processes, let it "
                "start `amanda run` in each, as in `mpirun -n 2 amanda run train.py`"
            )
        click.echo(text, err=True)
        return 2
    config, overview = _merged(found, options)
    return _prepared(there, config, options, overview)


def made(program: Program, options: Options) -> dict[str, Tool]:
    """Return the tools of a run by the names of their results, for another process of it.

    Raises:
        AmandaError: They cannot be made.
    """
    return _tools(_merged(_layers(program, options), options)[0])


def _layers(program: Program | None, options: Options) -> tuple[Layer, Layer, Layer]:
    return layers(
        program.folder if program is not None else Path.cwd(),
        options.layer(),
        file=Path(options.file) if options.file else None,
        use_file=not options.no_config,
    )


def _merged(found: tuple[Layer, Layer, Layer], options: Options) -> tuple[Config, Overview | None]:
    """Return the settings that hold, and the overview if no tools are named."""
    config = merge(*found)
    block(config.disabled)
    overview = None
    if not any(layer.tools for layer in found) and (overview := find_overview()) is not None:
        chosen = replace(options, tools=default_tools(overview)).layer()
        config = merge(*found[:-1], chosen)
    if not config.tools:
        raise ConfigError(
            "No tool is named",
            fix="Name one with -t TOOL, or in [tool.amanda.tools]; `amanda tools` lists them. "
            "Without one, those of amanda-tools give an overview: pip install amanda-tools",
        )
    return config, overview


def _tools(config: Config) -> dict[str, Tool]:
    if config.drivers is not None:
        use_only(config.drivers, config.where)
    announce(by_command=True)
    made = {settings.name: factories.make(settings) for settings in config.tools}
    for name, tool in made.items():
        _check_frameworks(name, tool)
    return made


def _check_frameworks(name: str, tool: Tool) -> None:
    """Refuse a tool that edits if none of the frameworks that it works on has a driver.

    A tool that only looks says so in its result, and the program goes on.

    Raises:
        MissingDriverError: It is refused.
    """
    wanted = {pattern.partition("/")[0] for pattern in tool.works_on} - {"*"}
    if tool.changes_values is False or not wanted:
        return
    if wanted.isdisjoint(driver.info.name for driver in discovery.drivers()):
        raise MissingDriverError(
            f"The tool {name!r} works on {' and '.join(sorted(wanted))}, of which no driver is "
            "installed, so the program did not start",
            where="-t",
            fix="`amanda drivers` lists the drivers that are; `amanda tools`, where tools work",
        )


def _prepared(program: Program, config: Config, options: Options, overview: Overview | None) -> Run:
    """Reserve the folder of results, import the tools and return what is to be run."""
    disown()
    process = Process.of_environment()
    names = [settings.name for settings in config.tools]
    folder = ResultFolder(
        names, process.part, options.force, children=not options.no_children
    ).reserve(config.output, config.output_is_shared)
    try:
        page = None
        if options.html is not None:
            page = ReportPage(Path(options.html), process.part, force=options.force)
        elif overview is not None:
            page = ReportPage(folder.folder / PAGE, force=options.force)
        keep_records_in(folder.folder)
        program.enter()  # Before tools are imported: they may lie beside the script.
        made = _tools(config)
        limits = conditions(options.fail_if, made)
    except BaseException:
        drop_records()
        folder.release()
        raise
    return Run(
        program,
        made,
        folder,
        process,
        page,
        quiet=options.quiet,
        brief=bool(process.rank),
        keep_going=options.keep_going,
        overview=overview,
        limits=limits,
        children=None if options.no_children else partial(told, options=asdict(options)),
    )
