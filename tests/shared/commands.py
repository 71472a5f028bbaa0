"""The command line, called in this process."""

from __future__ import annotations

import pytest

from amanda_core.cli import main

__all__ = ["exit_status"]


def exit_status(command: str, *arguments: object) -> int:
    """Run a command of `amanda`, and return its exit status."""
    with pytest.raises(SystemExit) as ended:
        main([command, *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code
