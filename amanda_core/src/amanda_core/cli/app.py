"""The command group `amanda`, and its handling of errors before a program runs.

Owns the exit statuses: 2 for a mistake in the call or the configuration, as in click. `commands`
finds the commands of other distributions.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from amanda_core import __version__
from amanda_core.cli.commands import Commands
from amanda_core.errors import AmandaError
from amanda_core.results import printable

__all__ = ["amanda", "parse"]


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="amanda")
def amanda() -> None:
    """Instrumentation of neural networks: look at and change every operator of any model."""


def parse(arguments: Sequence[str] | None) -> int | Callable[[], int]:
    """Run a command.

    Returns:
        The exit status, or the run of a program, which is left to the caller.
    """
    try:
        outcome: Any = amanda.main(
            None if arguments is None else list(arguments),
            prog_name="amanda",
            standalone_mode=False,
        )
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except AmandaError as error:
        click.echo(f"Error: {printable(error)}", err=True)
        return 2
    except BrokenPipeError:
        # The reader of our output has closed it. Python would report that again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if callable(outcome):
        return outcome  # type: ignore[no-any-return]
    # A command of another distribution may return anything else, which is not a status.
    return outcome if isinstance(outcome, int) else 0
