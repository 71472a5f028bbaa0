"""Programs of several processes, whose results the tests read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["found_by_ranks"]


def found_by_ranks(program: str, processes: int, folder: Path) -> list[dict[str, Any]]:
    """Run a program in several processes, and return what each has found.

    Args:
        program: A file, since a package of tests cannot be imported in another process. It gets its
            rank and the folder, and writes ``RANK.json`` there.
        processes: How many.
        folder: An empty folder.
    """
    commands = [[sys.executable, program, str(rank), str(folder)] for rank in range(processes)]
    for process in [subprocess.Popen(command) for command in commands]:
        assert process.wait(240) == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]
