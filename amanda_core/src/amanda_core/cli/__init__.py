"""The program `amanda`: listing what is installed, and running programs under tools.

Owns the entry point alone, so that a missing extra can say its name. Stands beside the engine,
which does not import it; nothing here imports a framework, or rich where nothing is drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from amanda_core.errors import MissingExtraError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program with `arguments`, those of the process by default; ends by SystemExit."""
    try:
        from amanda_core.cli import app
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        missing = MissingExtraError(
            "The command line needs click", fix='Run: pip install "amanda-core[cli]"'
        )
        sys.exit(f"Error: {missing}")
    outcome = app.parse(arguments)
    # A program is run out here: click would turn its Ctrl-C and its errors into its own.
    sys.exit(outcome if isinstance(outcome, int) else outcome())
