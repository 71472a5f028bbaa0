"""What is left of a run that does not end well: results until then, and what `amanda show` says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from amanda_core.cli import termination
from amanda_core.results.run_state import STATE, RunState

from .site import Site

TOOL = """
import json
import os
from toytools import Counter, Found


class Shown(Found):
    def to_json(self):
        return json.dumps({"format": "shown/1", "calls": self.tool.calls})


class Shows(Counter):
    def result(self):
        return Shown(self)
"""
MODEL = """
import ctypes, os, signal, sys, threading, time
import toyframe

def model(count):
    for _ in range(count):
        with toyframe.scope("encoder"):
            toyframe.relu(toyframe.Value(2.0))

def hang():  # Waits in C without the GIL, and no signal interrupts it.
    mutex = ctypes.create_string_buffer(256)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print("ready", flush=True)
    lock(mutex)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    made = Site(tmp_path_factory.mktemp("site"))
    made.write("shows.py", TOOL)
    (made.path / "hanging.py").write_text(MODEL)
    return made


@pytest.fixture
def out(site: Site, request: pytest.FixtureRequest) -> Path:
    return site.work / "".join(c if c.isalnum() else "_" for c in request.node.name)


def started(site: Site, out: Path, program: str) -> subprocess.Popen[str]:
    """Start a program under the tool, and wait until it says that it is ready."""
    site.write(f"{out.name}.py", f"from hanging import *\n{program}")
    arguments = ("-m", "amanda", "run", "-t", "shows.py:Shows", "-o", str(out), f"{out.name}.py")
    process = site.start(*arguments)
    late = threading.Timer(60, process.kill)  # Instead of waiting for what it does not say.
    late.daemon = True
    late.start()
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)  # It is about to wait.
    return process


def saved(out: Path, within: float = 20.0) -> dict[str, int]:
    """Wait for results of a program that is running."""
    end = time.monotonic() + within
    while not (out / "Shows.json").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    found: dict[str, int] = json.loads((out / "Shows.json").read_text())["calls"]
    return found


def test_a_process_that_waits_in_c_ends_by_sigterm_with_results(site: Site, out: Path) -> None:
    process = started(site, out, "model(3)\nhang()\n")
    with process:
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert time.monotonic() - began < 10  # Under plain python it ends at once.
    assert saved(out) == {"encoder/relu": 3}
    shown = site.amanda("show", str(out))
    line = shown.stdout.splitlines()[0]
    assert re.fullmatch(
        rf"{out.name}\.py \(process \d+\) ended by SIGTERM in hang \(hanging\.py:15\)",
        line,
    )
    assert "encoder/relu" in shown.stdout


def test_ctrl_c_in_c_writes_results_and_says_where_it_waits(site: Site, out: Path) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        pytest.skip("SIGINT is ignored here, as in the background of a shell, and so by programs")
    process = started(site, out, "model(3)\nhang()\n")
    with process:
        process.send_signal(signal.SIGINT)
        assert saved(out) == {"encoder/relu": 3}
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        said = next(line for line in lines if "interrupted" in line)
        assert "interrupted, but waiting in hang (hanging.py:15); the results until now" in said
        assert process.poll() is None  # Nor does the plain program end.
        shown = site.amanda("show", str(out)).stdout
        assert "has not ended yet; its results are those of 20" in shown
        assert "It was waiting in hang (hanging.py:15)" in shown
        process.kill()


@pytest.mark.parametrize("end", ["kill", pytest.param("crash", marks=pytest.mark.slow)])
def test_results_survive_a_process_that_is_killed_or_crashes(
    site: Site, out: Path, end: str
) -> None:
    crash = "while not os.path.exists(sys.argv[0] + '.go'): time.sleep(0.05)\nctypes.string_at(0)\n"
    process = started(site, out, f"model(3)\nprint('ready', flush=True)\n{crash}")
    with process:
        assert saved(out) == {"encoder/relu": 3}
        if end == "kill":
            process.kill()
        else:
            site.write(f"{out.name}.py.go", "")
        process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if end == "kill" else -signal.SIGSEGV)
    shown = site.amanda("show", str(out))
    first = shown.stdout.splitlines()[0]
    assert re.match(rf"{out.name}\.py \(process \d+\) did not end: it was killed or has", first)
    assert "encoder/relu" in shown.stdout
    for_programs = site.amanda("show", str(out), "--json")
    assert json.loads(for_programs.stdout) == [{"format": "shown/1", "calls": {"encoder/relu": 3}}]
    assert "did not end" in for_programs.stderr
    # The folder is free again, but not for other results of these tools.
    again = site.amanda("run", "-t", "shows.py:Shows", "-o", str(out), f"{out.name}.py")
    assert "has results already" in again.stderr


@pytest.mark.parametrize("status", [0, 3])
def test_results_are_written_before_os_exit(site: Site, out: Path, status: int) -> None:
    site.write("leave.py", f"from hanging import *\nmodel(5)\nos._exit({status})\n")
    done = site.amanda("run", "-t", "shows.py:Shows", "-o", str(out), "leave.py")
    assert done.returncode == status
    assert saved(out) == {"encoder/relu": 5}
    shown = site.amanda("show", str(out)).stdout
    assert (") ended with status 3 by os._exit\n" in shown) == (status == 3)


def test_os_exit_is_as_before_in_a_fork_and_after_the_run(site: Site, out: Path) -> None:
    site.write(
        "fork.py",
        "from hanging import *\nimport atexit, posix\nmodel(1)\npid = os.fork()\n"
        "if not pid:\n    assert os._exit is posix._exit\n    os._exit(5)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "atexit.register(lambda: print(os._exit is posix._exit))\n",
    )
    done = site.amanda("run", "-t", "shows.py:Shows", "-o", str(out), "fork.py")
    assert done.stdout == "5\nTrue\n", done.stderr
    assert done.returncode == 0
    assert not (out / STATE).exists()


@pytest.mark.slow
def test_a_full_disk_is_named_and_the_program_goes_on(site: Site, out: Path) -> None:
    """No file may have more bytes than the tool's result, as on a disk without space."""
    process = started(
        site,
        out,
        "import resource\nmodel(3)\nresource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))\n"
        "print('ready', flush=True)\ntime.sleep(3)\nprint('done')\n",
    )
    with process:
        stdout, stderr = process.communicate(timeout=60)
    assert stdout == "done\n"
    assert process.returncode == 1  # A result could not be written.
    named = [line for line in stderr.splitlines() if "cannot be written: File too large" in line]
    until = [line for line in named if "results until now are not written" in line]
    assert len(until) == 1
    assert until[0].endswith("; the program goes on")
    assert any("the result of 'Shows' is not written" in line for line in named)


def test_how_a_program_ended_is_said_first(site: Site, out: Path) -> None:
    site.write("fails.py", "from hanging import *\nmodel(2)\nraise ValueError('its own')\n")
    site.amanda("run", "-t", "shows.py:Shows", "-o", str(out), "fails.py")
    first = site.amanda("show", str(out)).stdout.splitlines()[0]
    assert re.fullmatch(r"fails\.py \(process \d+\) ended by ValueError: its own", first)


def test_a_state_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert RunState.read(tmp_path) is None
    for content in ("", "[]", '{"pid": 3}', "\xff"):
        (tmp_path / STATE).write_text(content)
        assert RunState.read(tmp_path) is None
    (tmp_path / STATE).write_text('{"program": "a", "pid": 3, "later": 1}')
    state = RunState.read(tmp_path)
    assert state == RunState("a", 3)
    assert state.sentence(tmp_path) == (
        "a (process 3) did not end: it was killed or has crashed; nothing was written until then"
    )


def test_a_thread_that_waits_for_the_end_is_not_taken_for_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The program handles the signal itself, and ends before the other thread has looked."""
    said: list[str] = []

    class Ending:
        def finish(self, problem: str, *, unwound: bool) -> None:
            said.append(problem)

        def interrupted(self, place: str) -> None:
            said.append(place)

    monkeypatch.setattr(termination, "_position", lambda: (0, 0))  # As if nothing went on.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with termination.Termination(Ending()).handled():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert said == []
