"""Counts of instructions: a benchmark runs itself once more inside valgrind's callgrind.

A small library, compiled for it, says from where to where to count.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

__all__ = ["collected", "count", "counted", "missing"]

SWITCH = """\
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void stop(const char *name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
"""


def missing() -> list[str]:
    """The programs that this needs and that are not there."""
    return [program for program in ("valgrind", "cc") if shutil.which(program) is None]


def count(script: str) -> dict[str, int]:
    """Instructions by the names that `counted` was given, in the order of counting.

    Args:
        script: The benchmark; with ``--inside`` and the path of a library it counts.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, library = folder / "switch.c", folder / "switch.so"
        source.write_text(SWITCH)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        command = [
            *("valgrind", "--tool=callgrind", "--instr-atstart=no"),
            f"--callgrind-out-file={folder / 'counts'}",
            *(sys.executable, script, "--inside", str(library)),
        ]
        # Python hashes strings alike in each run of this program.
        subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": "0"})
        return collected(folder)


def collected(folder: Path) -> dict[str, int]:
    """What callgrind has written down, by the names of its dumps."""
    found = {}
    # Numbered as they were written.
    for dump in sorted(folder.glob("counts.*"), key=lambda path: int(path.suffix[1:])):
        text = dump.read_text()
        name = re.search(r"^desc: Trigger: Client Request: (.+)$", text, re.MULTILINE)
        total = re.search(r"^totals: (\d+)", text, re.MULTILINE)
        if name is not None and total is not None:
            found[name[1]] = int(total[1])
    return found


def counted(
    library: Path,
    name: str,
    program: Callable[[], object],
    extent: AbstractContextManager[object],
    warm: int,
    times: int,
) -> None:
    """Run a program until it is settled, and then as often as is counted.

    Args:
        library: What `count` has made.
        name: What it is counted as.
        program: What is run.
        extent: What it is run in.
        warm: Runs that are not counted.
        times: Runs that are.
    """
    switch = ctypes.CDLL(str(library))
    print(name, file=sys.stderr, flush=True)
    with extent:
        for _ in range(warm):
            program()
        gc.collect()
        gc.disable()
        try:
            switch.start()
            for _ in range(times):
                program()
            switch.stop(name.encode())
        finally:
            gc.enable()
