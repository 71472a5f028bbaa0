"""Amanda's own commands, and those of other distributions: entry points ``amanda.commands``.

Owns how they are found and what replaces one that cannot be used. A broken command must not end
another one or hide one of Amanda's own. A command is imported when it is used or described.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import NoReturn

import click

from amanda_core.cli.blocking import block_configured
from amanda_core.errors import AmandaError
from amanda_core.plugins.installed import COMMAND_GROUP, Installed, installed
from amanda_core.plugins.tool_names import is_shipped
from amanda_core.results import printable
from amanda_core.runtime.containment import contain, described

__all__ = ["Commands", "problems"]


#: Amanda's own commands, each in the module of its name.
_OWN = ("doctor", "drivers", "explain", "export", "new", "run", "show", "tools")


class _UnusableError(Exception):
    """A command cannot be used; the message says why."""


class Commands(click.Group):
    """Amanda's own commands, followed by those of installed distributions."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, including those that cannot be used."""
        return [*_OWN, *sorted(set(_names()) - set(_OWN))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, or one that reports why it cannot be used; None if there is none."""
        if cmd_name in _OWN:
            module = importlib.import_module(f"amanda_core.cli.{cmd_name}")
            own: click.Command = getattr(module, cmd_name)
            return own
        if cmd_name not in _names():
            return None
        try:
            return _load(cmd_name)
        except _UnusableError as error:
            return _stand_in(cmd_name, str(error))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands, each with its whole first sentence, which click would cut short."""
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(500)) for name, one in found if one])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that is named by the first argument."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            hint = "Other distributions bring more commands: pip install amanda-tools"
            raise click.UsageError(f"{error.message} {hint}", error.ctx) from None


def problems() -> list[tuple[str, str]]:
    """Return the installed commands that do not work and why, without blocked ones."""
    found = []
    for name in sorted(set(_names())):
        try:
            _load(name)
        except _UnusableError as error:
            if not all(command.blocked for command in _named(name)):
                found.append((name, str(error)))
    return found


def _names() -> list[str]:
    return [printable(found.name) for found in installed(COMMAND_GROUP)]


def _named(name: str) -> list[Installed]:
    return [found for found in installed(COMMAND_GROUP) if printable(found.name) == name]


def _load(name: str) -> click.Command:
    """Import a command.

    Raises:
        _UnusableError: It is blocked or broken, or several distributions have it.
    """
    try:
        block_configured()
    except AmandaError as error:
        # It may be what blocks the command.
        raise _UnusableError(f"not imported: {printable(error)}") from error
    found = _chosen(name)
    try:
        # The output of another command must not have what it prints during its import.
        with redirect_stdout(sys.stderr):
            command = found.point.load()
            if not isinstance(command, click.Command):
                raise TypeError(f"{type(command).__name__} is not a click.Command")
            command.get_short_help_str()  # The list shows it, and must not fail.
    except BaseException as error:
        contain(error)
        raise _UnusableError(f"broken: {found.origin}: {described(error)}") from error
    return command


def _chosen(name: str) -> Installed:
    named = _named(name)
    usable = [found for found in named if not found.blocked]
    if not usable:
        raise _UnusableError(f"blocked by {named[0].blocked}")
    shipped = [found for found in usable if is_shipped(found)]
    if len(usable) > 1 and not shipped:
        origins = ", ".join(found.origin for found in usable)
        raise _UnusableError(f"broken: it is in several distributions: {origins}")
    return (shipped or usable)[0]


def _stand_in(name: str, why: str) -> click.Command:
    def refuse(arguments: Sequence[str]) -> NoReturn:
        raise click.UsageError(f"The command {name!r} cannot be used ({why})")

    return click.Command(
        name,
        callback=refuse,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        help=f"Cannot be used ({why}).",
        short_help=f"({why})",
        context_settings={"ignore_unknown_options": True},
    )
