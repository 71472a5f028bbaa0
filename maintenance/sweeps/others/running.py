"""Run the tests of one file in processes of their own, and return the outcome of each test.

The plugin in `injected` writes each outcome as soon as it is known. If a process crashes or hangs,
this is the outcome of the current test, and another process continues after it.
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

#: Maximum number of processes that are started for one file.
PROCESSES = 20


@dataclasses.dataclass(frozen=True)
class Limits:
    """Time limits in seconds.

    Attributes:
        collection: Until the first test starts.
        test: Until one test ends.
        file: Until all tests of a file end.
    """

    collection: float = 600
    test: float = 900
    file: float = 3600


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of one test.

    Attributes:
        outcome: ``passed``, ``failed``, ``skipped``, ``expected`` (an expected failure),
            ``crashed`` or ``hung``.
        why: End of pytest's output about it.
        seconds: Duration.
        eager_frames: Why frames of compiled callables ran eagerly under the tool.
    """

    outcome: str
    why: str = ""
    seconds: float = 0.0
    eager_frames: Collection[str] = ()


@dataclasses.dataclass
class Ran:
    """Outcomes of the tests of one file.

    Attributes:
        outcomes: Outcomes by id, in the order of execution.
        not_collected: What could not be imported, and why.
        incomplete: Why not all tests ran; empty if they did.
        printed: End of the last process's output.
    """

    outcomes: dict[str, Outcome] = dataclasses.field(default_factory=dict)
    not_collected: dict[str, str] = dataclasses.field(default_factory=dict)
    incomplete: str = ""
    printed: str = ""


@dataclasses.dataclass(frozen=True)
class TestFile:
    """A file of tests.

    Attributes:
        path: Path relative to `root`.
        root: Folder to which the ids of tests are relative.
        every: Run only each n-th test.
        variables: Environment variables of the process.
        alone: Whether to copy the file into a folder of its own. Otherwise files next to it would
            be imported instead of the installed package.
        beside: Names of files in its folder that are copied with it.
        compiles: Whether its tests may compile with torch.
    """

    path: str
    root: Path
    every: int = 1
    alone: bool = False
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    beside: Collection[str] = ()
    compiles: bool = False


def run(file: TestFile, applied: str, limits: Limits, only: Collection[str] | None = None) -> Ran:
    """Run the tests of a file.

    Args:
        file: The file.
        applied: ``plain``, ``eager`` if plain PyTorch must compile nothing, or the name of a tool
            of the plugin.
        limits: Time limits.
        only: Ids of the tests to run; None for each `file.every`-th.
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
    """Run one process and add its outcomes; return whether it reached the last test."""
    noted, printed = folder / "outcomes.jsonl", folder / "printed"
    noted.write_text("")
    settings = _write(folder / "pytest.ini", ["[pytest]"])
    root, path = file.root, file.path
    if file.alone:
        root, path = folder / "alone", Path(path).name
        root.mkdir(exist_ok=True)
        whole = file.root / file.path
        for each in (whole, *(whole.parent / name for name in file.beside)):
            if each.exists():
                shutil.copy(each, root)
    command = [sys.executable, "-P", "-m", "pytest", path, "-q", "--tb=short"]
    command += ["-c", str(settings), "--rootdir", str(root), "-p", "no:cacheprovider"]
    command += ["-p", "applied_tools", "--applied", applied, "--outcomes", str(noted)]
    # Of a folder, run what can be imported.
    command += ["--continue-on-collection-errors"]
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
    # pytest's status: 0 all passed, 1 some failed, 5 no tests.
    elif process.returncode not in (0, 1, 5) and not ran.not_collected:
        ran.incomplete = f"the process ended with status {process.returncode}"
    elif not ran.outcomes and not ran.not_collected:
        ran.incomplete = f"no test ran: {ran.printed[-300:]}"
    return True


def _wait(process: subprocess.Popen[bytes], noted: Path, limits: Limits, end: float) -> bool:
    """Wait until a process ends, and kill it if it reaches a limit; return whether it did."""
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
    """Read the outcomes of a process; return the test in which it ended, or None."""
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
