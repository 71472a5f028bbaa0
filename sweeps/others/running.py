"""Runs the tests of one file in processes of their own, and returns the outcome of each test.

The plugin in `injected` notes each outcome as soon as it is known. A process that crashes or hangs
therefore costs one test: its outcome is the crash, and another process goes on after it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

INJECTED = Path(__file__).parent / "injected"

#: So many processes are started for one file, at most.
PROCESSES = 20


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long to wait, in seconds.

    Attributes:
        collection: For the first test to begin.
        test: For one test to end.
        file: For all tests of a file.
    """

    collection: float = 600
    test: float = 300
    file: float = 3600


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one test.

    Attributes:
        outcome: `passed`, `failed`, `skipped`, `expected` (an expected failure), `crashed` or
            `hung`.
        why: The end of what pytest prints of it.
        seconds: How long it took.
    """

    outcome: str
    why: str = ""
    seconds: float = 0.0


@dataclasses.dataclass
class Ran:
    """What came of the tests of one file.

    Attributes:
        outcomes: By id, in the order in which they ran.
        not_collected: What could not be imported, and why.
        incomplete: Why not all tests ran; empty if they did.
        printed: The end of what the last process printed.
    """

    outcomes: dict[str, Outcome] = dataclasses.field(default_factory=dict)
    not_collected: dict[str, str] = dataclasses.field(default_factory=dict)
    incomplete: str = ""
    printed: str = ""


@dataclasses.dataclass(frozen=True)
class TestFile:
    """A file of tests.

    Attributes:
        path: Relative to `root`.
        root: The folder to which ids of tests are relative.
        every: Only each n-th test is run.
        variables: Environment variables of the process.
        alone: Whether the file is copied into a folder of its own. Others beside it would otherwise
            be imported instead of what is installed.
    """

    path: str
    root: Path
    every: int = 1
    alone: bool = False
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


def run(file: TestFile, applied: str, limits: Limits, only: Collection[str] | None = None) -> Ran:
    """Run the tests of a file.

    Args:
        file: The file.
        applied: `plain`, or the name of a tool of the plugin.
        limits: How long to wait.
        only: The ids of the tests to run; None: each `file.every`-th.
    """
    ran = Ran()
    if only is not None and not only:
        return ran
    end = time.monotonic() + limits.file
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(PROCESSES):
            ended = _process(file, applied, limits, only, ran, Path(folder), end)
            if ended:
                break
        else:
            ran.incomplete = f"{PROCESSES} processes crashed or hung"
    return ran


def _process(
    file: TestFile,
    applied: str,
    limits: Limits,
    only: Collection[str] | None,
    ran: Ran,
    folder: Path,
    end: float,
) -> bool:
    """Run one process and add what it notes; return whether it reached the last test."""
    noted, printed = folder / "outcomes.jsonl", folder / "printed"
    noted.write_text("")
    settings = _write(folder / "pytest.ini", ["[pytest]"])
    root, path = file.root, file.path
    if file.alone:
        root, path = folder / "alone", Path(path).name
        root.mkdir(exist_ok=True)
        shutil.copy(file.root / file.path, root)
    command = [sys.executable, "-P", "-m", "pytest", path, "-q", "--tb=short"]
    command += ["-c", str(settings), "--rootdir", str(root), "-p", "no:cacheprovider"]
    command += ["-p", "applied_tools", "--applied", applied, "--outcomes", str(noted)]
    command += ["--leave-out", str(_write(folder / "done", ran.outcomes))]
    if only is None:
        command += ["--every", str(file.every)]
    else:
        command += ["--only-ids", str(_write(folder / "only", only))]
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **file.variables,
        "PYTHONPATH": str(INJECTED),
    }
    with printed.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=root,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        hung = _wait(process, noted, limits, end)
    ran.printed = printed.read_text(errors="replace")[-2000:]
    running = _read(noted, ran)
    if running is not None:
        why = "no end after the time limit" if hung else f"status {process.returncode}"
        ran.outcomes[running] = Outcome("hung" if hung else "crashed", f"{why}\n{ran.printed}")
        if time.monotonic() < end:
            return False
    if time.monotonic() >= end:
        ran.incomplete = f"the time limit of {limits.file:.0f} s was reached"
    elif hung:
        ran.incomplete = "no test began within the time limit"
    # Of pytest: tests failed, none failed, none was there.
    elif process.returncode not in (0, 1, 5) and not ran.not_collected:
        ran.incomplete = f"the process ended with status {process.returncode}"
    elif not ran.outcomes and not ran.not_collected:
        ran.incomplete = f"no test ran: {ran.printed[-300:]}"
    return True


def _wait(process: subprocess.Popen[bytes], noted: Path, limits: Limits, end: float) -> bool:
    """Wait until a process ends, or end it as soon as a limit is reached; return whether it was."""
    size, since = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        now = time.monotonic()
        if (found := noted.stat().st_size) != size:
            size, since = found, now
        if now - since > (limits.test if size else limits.collection) or now > end:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return True
    return False


def _read(noted: Path, ran: Ran) -> str | None:
    """Read what a process noted, and return the test in which it ended, if there is one."""
    running = None
    for line in noted.read_text().splitlines():
        note = json.loads(line)
        name, outcome = note.pop("id"), note["outcome"]
        if outcome == "started":
            running = name
        elif outcome == "not collected":
            ran.not_collected[name] = note["why"]
        else:
            running = None
            ran.outcomes[name] = Outcome(**note)
    return running


def _write(path: Path, lines: Iterable[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path
