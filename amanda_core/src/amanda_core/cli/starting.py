"""Starting tools in a process that a program under `amanda run` has started.

`startup/sitecustomize.py` calls it when the process imports a framework.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from amanda_core.cli.children import VARIABLE, Child, process_of
from amanda_core.cli.program import Program
from amanda_core.cli.run import Options, made
from amanda_core.results.output import Output
from amanda_core.results.records import keep_records_in

__all__ = ["start"]


def start() -> None:
    """Start the tools in this process, which the variable describes.

    Raises:
        AmandaError: They cannot be made.
        OSError: The folder in which flags are read is gone.
    """
    given = json.loads(os.environ[VARIABLE])
    target, is_module = given["program"]
    program = Program(target, is_module=is_module)
    flags: dict[str, Any] = given["options"]
    for name in [name for name, value in flags.items() if isinstance(value, list)]:
        flags[name] = tuple(flags[name])
    options = Options(**flags)
    keep_records_in(Path(given["folder"]))
    here = os.getcwd()
    os.chdir(given["where"])
    beside = str(program.folder)
    sys.path.append(beside)  # Tools may lie beside the script.
    try:
        tools = made(program, options)
    finally:
        os.chdir(here)
        sys.path.remove(beside)
    process = process_of(given["rank"])
    folder = Path(given["folder"])
    if process.rank is not None:  # What it starts inherits its variables.
        inner = {
            **json.loads(os.environ[VARIABLE]),
            "rank": process.rank,
            "folder": str(folder / process.part),
        }
        os.environ[VARIABLE] = json.dumps(inner)
    own = " ".join(sys.orig_argv[1:3]) if sys.argv[0] in ("-c", "-m", "") else sys.argv[0]
    child = Child(
        Program(own[:200]),
        tools,
        Output(folder, [], force=True),
        process,
        quiet=options.quiet,
        brief=process.rank != 0,
        keep_going=options.keep_going,
        number=given["run"],
        folder=folder,
        names=[*tools],
        force=options.force,
        known=given["rank"],
    )
    child.begin()
