"""The program `amanda`: listing what is installed, and running programs under tools.

Owns only the entry point, which names a missing extra. The engine does not import this package.
Nothing here imports a framework, nor rich unless something is drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from amanda_core.errors import MissingExtraError
from amanda_core.plugins.requirements import extra_command

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `amanda` with `arguments`, by default those of the process, and raise SystemExit."""
    try:
        from amanda_core.cli import app
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        missing = MissingExtraError(
            "The command line needs the extra cli of amanda-core",
            fix=f"Run: {extra_command('amanda-core', 'cli')}",
        )
        sys.exit(f"Error: {missing}")
    outcome = app.parse(arguments)
    # The program runs outside of click, which would replace its Ctrl-C and its errors by its own.
    sys.exit(outcome if isinstance(outcome, int) else outcome())
