"""A Python process that runs programs for tests, one after the other.

What the programs import is imported only once. The programs are not isolated: a later one sees what
an earlier one left, unless each runs in a fork. A process with TensorFlow must not fork.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

SERVER = """
import json, os, runpy, sys, tempfile, traceback

requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")

def run(arguments):
    sys.argv = arguments
    try:
        # From a file: some libraries read the source of functions.
        runpy.run_path(arguments[0], names, "__main__")
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0

def run_in_a_fork(arguments):
    child = os.fork()
    if child == 0:
        os._exit(run(arguments))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

start, forks = json.loads(next(requests))
names = {}
exec(start, names)
for line in requests:
    with tempfile.TemporaryFile("w+") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        status = (run_in_a_fork if forks else run)(json.loads(line))
        output.seek(0)
        print(json.dumps([status, output.read()]), file=answers, flush=True)
"""


class Ran(NamedTuple):
    """Outcome of a program."""

    status: int
    #: Of both streams.
    output: str


class ProgramServer:
    """A server process; it ends with the `with` block."""

    def __init__(
        self,
        start: str,
        forks: bool = False,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process and run `start` once, whose names the programs see."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=env,
        )
        self._send([start, forks])
        self._programs = tempfile.TemporaryDirectory()

    def run(self, program: str, *arguments: object) -> Ran:
        """Run a program with these command-line arguments to its end."""
        # Of one name each: what was traced from a source is known by its place.
        with tempfile.NamedTemporaryFile(
            "w", suffix=".py", dir=self._programs.name, delete=False
        ) as file:
            file.write(program)
        self._send([file.name, *map(str, arguments)])
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        assert answer, f"the server ended with status {self._process.wait()}"
        return Ran(*json.loads(answer))

    def check(self, program: str, *arguments: object) -> str:
        """Run a program that must succeed and return its output."""
        status, output = self.run(program, *arguments)
        assert status == 0, output
        return output

    def __enter__(self) -> ProgramServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()
        self._programs.cleanup()

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
