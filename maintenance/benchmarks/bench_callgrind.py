"""Counts of instructions: a benchmark runs itself again inside valgrind's callgrind.

A small library, compiled on the fly, starts and stops the counting.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

__all__ = ["Switch", "collected", "count", "counted", "missing", "run"]

SWITCH = """\
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void stop(const char *name) { CALLGRIND_DUMP_STATS_AT(name); CALLGRIND_STOP_INSTRUMENTATION; }
void zero(void) { CALLGRIND_ZERO_STATS; }
void dump(const char *name) { CALLGRIND_DUMP_STATS_AT(name); }
"""


def missing() -> list[str]:
    """Return the required programs that are not installed."""
    return [program for program in ("valgrind", "cc") if shutil.which(program) is None]


def run(
    parser: argparse.ArgumentParser,
    inside: Callable[[Path, list[str]], None],
    outside: Callable[[argparse.Namespace], None],
) -> None:
    """Run a benchmark: `outside` calls `count`, which runs the program again for `inside`.

    Args:
        parser: The parser of the benchmark's arguments.
        inside: Called inside valgrind with the library and the names that `count` was given.
        outside: Called with the arguments, unless a required program is missing.
    """
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        inside(Path(options.inside[0]), options.inside[1:])
    elif absent := missing():
        print(f"No instructions are counted: no {' and no '.join(absent)}.", file=sys.stderr)
    else:
        outside(options)


def count(script: str, *names: str, options: Sequence[str] = ()) -> dict[str, int]:
    """Return the number of instructions for each name passed to `counted`, in the order of
    counting.

    Args:
        script: File of the benchmark in this folder, which calls `run`.
        *names: What it has to count.
        options: Further options of callgrind.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, library = folder / "switch.c", folder / "switch.so"
        source.write_text(SWITCH)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        command = [
            *("valgrind", "--tool=callgrind", "--instr-atstart=no", *options),
            f"--callgrind-out-file={folder / 'counts'}",
            *(sys.executable, "-m", f"{__package__}.{Path(script).stem}"),
            *("--inside", str(library), *names),
        ]
        # The same hashes of strings in each run.
        subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": "0"})
        return collected(folder)


def collected(folder: Path) -> dict[str, int]:
    """Return the counts that callgrind has written, by the names of its dumps: of several of one
    name the lowest.
    """
    found: dict[str, int] = {}
    # The suffix numbers the dumps in the order of writing.
    for dump in sorted(folder.glob("counts.*"), key=_number):
        if dump.suffix.partition("-")[2] not in ("", "01"):
            continue  # Of another thread than the first one.
        text = dump.read_text()
        name = re.search(r"^desc: Trigger: Client Request: (.+)$", text, re.MULTILINE)
        total = re.search(r"^totals: (\d+)", text, re.MULTILINE)
        if name is not None and total is not None:
            found[name[1]] = min(int(total[1]), found.get(name[1], int(total[1])))
    return found


def _number(dump: Path) -> int:
    return int(dump.suffix[1:].partition("-")[0])


def counted(
    library: Path,
    name: str,
    program: Callable[[], object],
    extent: AbstractContextManager[object],
    warm: int,
    times: int,
    repeated: int = 1,
) -> None:
    """Run a program until it is warm, and then count the instructions of further runs.

    Args:
        library: The library that `count` has compiled.
        name: Name of the count.
        program: The program.
        extent: Context manager in which it runs.
        warm: Number of runs that are not counted.
        times: Number of runs that are counted.
        repeated: How often as many are counted.
    """
    switch = ctypes.CDLL(str(library))
    print(name, file=sys.stderr, flush=True)
    with extent:
        for _ in range(warm):
            program()
        gc.collect()
        gc.disable()
        try:
            for _ in range(repeated):
                switch.start()
                for _ in range(times):
                    program()
                switch.stop(name.encode())
        finally:
            gc.enable()


class Switch:
    """Counts short parts of one program.

    Args:
        library: The library that `count` has compiled.
    """

    def __init__(self, library: Path) -> None:
        self._switch = ctypes.CDLL(str(library))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Run what is inside `with` slowly, so that parts of it can be counted."""
        self._switch.start()
        yield
        self._switch.stop(b"")

    @contextmanager
    def count(self, name: str) -> Iterator[None]:
        """Count the instructions of what runs inside `with`, inside of `counting`."""
        self._switch.zero()
        yield
        self._switch.dump(name.encode())
