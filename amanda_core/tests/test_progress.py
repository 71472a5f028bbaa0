"""What `amanda run` prints about a program while it runs."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

import amanda
from amanda_core.cli.progress import Progress, interval_for, told_if_slow
from amanda_core.testing.toy import framework as toy

from .site import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Return an installation of the test's own."""
    return Site(tmp_path)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def predict(count: int = 5) -> None:
    """Run operators forward, each in a module of its own, without the end of a step."""
    x = toy.Value(1.0)
    for number in range(count):
        with toy.scope(str(number)):
            x = toy.relu(x)


@pytest.mark.usefixtures("driver")
def test_steps_are_told_now_and_then() -> None:
    said: list[str] = []
    clock = Clock()
    with amanda.apply(Progress(said.append, interval=10, clock=clock)):
        for clock.now in (4.0, 11.0, 12.0, 20.0, 21.5):
            toy.relu(toy.Value(1.0))
            toy.update([], 0.1)
    # Operators run before a step ends. If steps end, only they are reported.
    assert said == ["2 steps in 11 s", "5 steps in 22 s"]


@pytest.mark.usefixtures("driver")
def test_the_first_line_comes_soon() -> None:
    said: list[str] = []
    clock = Clock()
    with amanda.apply(Progress(said.append, interval=10, first=2, clock=clock)):
        for clock.now in (1.0, 2.5, 11.0, 13.0):
            toy.relu(toy.Value(1.0))
            toy.update([], 0.1)
    assert said == ["2 steps in 2 s", "4 steps in 13 s"]


@pytest.mark.usefixtures("driver")
def test_a_program_that_is_slow_to_start_is_told_of_its_steps() -> None:
    said: list[str] = []
    clock = Clock()
    with amanda.apply(Progress(said.append, interval=10, first=2, clock=clock)):
        for clock.now in (3.0, 4.0, 14.0):
            toy.relu(toy.Value(1.0))
            toy.update([], 0.1)
    assert said == ["1 step in 3 s", "3 steps in 14 s"]


def test_what_takes_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amanda_core.cli.progress.FIRST", 0.05)
    said: list[str] = []
    with told_if_slow(said.append, "writing"):
        deadline = time.monotonic() + 10
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said == ["writing"]
    with told_if_slow(said.append, "short"):
        pass
    time.sleep(0.1)
    assert said == ["writing"]


@pytest.mark.usefixtures("driver")
def test_a_slow_first_step() -> None:
    said: list[str] = []
    clock = Clock()
    with amanda.apply(Progress(said.append, interval=10, clock=clock)):
        clock.now = 14.0
        amanda.step()
    assert said == ["1 step in 14 s"]


@pytest.mark.usefixtures("driver")
def test_without_steps_executions_are_told() -> None:
    said: list[str] = []
    clock = Clock()
    with amanda.apply(Progress(said.append, interval=10, clock=clock)):
        for clock.now in range(1001):
            predict()
    assert said[:2] == ["0/relu ran 11 times in 10 s", "0/relu ran 21 times in 20 s"]
    assert said[-1] == "0/relu ran 1,001 times in 1000 s"
    assert len(said) == 100


@pytest.mark.usefixtures("driver")
def test_a_loop_behind_other_operators_is_told() -> None:
    said: list[str] = []
    clock = Clock()
    with amanda.apply(Progress(said.append, interval=10, clock=clock)):
        with toy.scope("prepare"):
            predict(3)
        for clock.now in range(12):
            with toy.scope("model"):
                predict(9)
    # The first and the fourth are counted; the fourth is the first of the loop.
    assert said == ["model.0/relu ran 11 times in 10 s"]


@pytest.mark.usefixtures("driver")
def test_executions_are_told_after_the_last_step() -> None:
    said: list[str] = []
    clock = Clock()
    with amanda.apply(Progress(said.append, interval=10, clock=clock)):
        for clock.now in (6.0, 12.0):
            predict()
            amanda.step()
        for clock.now in (15.0, 22.0):
            predict()
    assert said == ["2 steps in 12 s", "0/relu ran 4 times in 22 s"]


@pytest.mark.usefixtures("driver")
def test_few_operators_are_counted() -> None:
    with amanda.apply(Progress(print)) as handle:
        predict(100)
        session = handle.session
        assert session is not None
        acted = [sum(1 for _ in session.actions_of(context)) for context in session.contexts()]
    assert [number for number, actions in enumerate(acted, 1) if actions] == [1, 4, 16, 64]


@pytest.mark.usefixtures("driver")
def test_a_short_program_is_told_nothing_of() -> None:
    said: list[str] = []
    with amanda.apply(Progress(said.append)):
        predict()
        amanda.step()
    assert said == []


def test_logs_get_fewer_lines_than_terminals() -> None:
    first, second = pty.openpty()
    with os.fdopen(first), os.fdopen(second, "w") as terminal:
        assert interval_for(terminal) < interval_for(io.StringIO())
    assert interval_for(None) == interval_for(terminal) == interval_for(io.StringIO())


#: `amanda run` as it is, with a shorter interval on terminals.
SOON = """
import sys
from amanda_core.cli import progress
progress._ON_TERMINAL = 0.0
from amanda_core.cli import main
sys.argv[0] = "amanda"
sys.exit(main())
"""
PROGRAM = """
import toyframe
for number in range(3):
    print("batch", number, flush=True)
    toyframe.relu(toyframe.Value(1.0))
"""


def on_terminal(site: Site, *options: str) -> tuple[list[str], str]:
    """Return what such a run writes to its terminal and to stdout."""
    site.write("infer.py", PROGRAM)
    first, second = pty.openpty()
    run = subprocess.run(
        [sys.executable, "-c", SOON, "run", *options, "-t", "count", "infer.py"],
        cwd=site.work,
        env=site.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=second,
        text=True,
        timeout=120,
        check=True,
    )
    os.close(second)
    shown = b""
    with suppress(OSError), os.fdopen(first, "rb", buffering=0) as terminal:
        while part := terminal.read(1 << 16):  # Fails at the end, where no writer is left.
            shown += part
    return shown.decode().splitlines(), run.stdout


def test_inference_on_a_terminal(site: Site) -> None:
    shown, printed = on_terminal(site)
    told = [line for line in shown if " in 0 s" in line]
    assert told == [f"amanda: relu ran {times} times in 0 s" for times in (2, 3)]
    assert printed == "batch 0\nbatch 1\nbatch 2\n"


def test_quiet_on_a_terminal(site: Site) -> None:
    assert on_terminal(site, "-q") == ([], "batch 0\nbatch 1\nbatch 2\n")


def test_a_short_program_in_a_log(site: Site) -> None:
    site.write("infer.py", PROGRAM)
    run = site.run("infer.py")
    assert run.stdout == "batch 0\nbatch 1\nbatch 2\n"
    assert " in 0 s" not in run.stderr
