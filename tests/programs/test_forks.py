"""Programs that fork while tools are applied: what their parent records, and what is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.one_interceptor,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork"),
]

#: Runs three forward passes, and one more in each fork, between the first two of them.
PROGRAM = """
    import os, sys, torch, multiprocessing
    from pathlib import Path

    torch.set_num_threads(1)
    model = torch.nn.Linear(3, 2)

    def step(number):
        with torch.no_grad():
            model(torch.full((1, 3), float(number)))

    def child(number):
        step(3)

    def forked(how):
        if how == "bare":
            if (pid := os.fork()) == 0:
                step(3)
                return True
            assert os.waitpid(pid, 0)[1] == 0
        elif how == "processes":
            every = [multiprocessing.get_context("fork").Process(target=child, args=[n])
                     for n in range(2)]
            for one in every:
                one.start()
            for one in every:
                one.join(60)
                assert one.exitcode == 0
        elif how == "workers":
            for _ in torch.utils.data.DataLoader(range(5), num_workers=2):
                pass
        return False

    def run(how):
        step(0)
        is_child = forked(how)
        step(1)
        step(2)
        return is_child
"""
APPLIED = """
    import amanda
    from amanda_tools.capture import Capture
    from amanda_tools.dump import Dump
    from amanda_tools.fingerprint import Fingerprint
    from amanda_tools.replicas import Replicas
    from amanda_tools.trace import Trace

    where = Path(sys.argv[2])
    def made(kind, name, **options):
        return kind(**options), kind(folder=where / name, **options)

    tools = [Trace(), *made(Dump, "dump"), *made(Fingerprint, "fingerprint"),
             *made(Replicas, "replicas"), Capture(ops=["linear"], form="safetensors")]
    with amanda.apply(*tools):
        is_child = run(sys.argv[1])
    own = Trace()
    with amanda.apply(own):  # Also in the fork, where it sees what it ought to.
        step(4)
    assert [op.calls for op in own.result().ops if op.type == "linear"] == [1]
    results = [tool.result() for tool in tools]
    if not is_child:
        for number, result in enumerate(results[1:]):
            result.write(where / "written" / str(number))
        print(tools[0].not_seen())
"""
FORKS = {"none": 0, "bare": 1, "processes": 2, "workers": 2}


def run(folder: Path, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    file = folder / "program.py"
    file.write_text(textwrap.dedent(program))
    command = [sys.executable, *(("-m", "amanda") if arguments[0] == "run" else ())]
    command += [str(file if one is None else one) for one in arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def said(count: int) -> list[str]:
    if not count:
        return []
    processes = "a process" if count == 1 else f"{count} processes"
    return [f"{processes} that the program forked ran without tools"]


def without_times(folder: Path) -> dict[str, Any]:
    """Return the files of a folder by name, with sizes of those that are not JSON."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".json":
            content = json.loads(path.read_text())
            found[str(path.relative_to(folder))] = content.get("tensors", content.get("values"))
        elif path.suffix in (".npz", ".safetensors", ".bin"):
            found[str(path.relative_to(folder))] = path.stat().st_size
    return found


def test_a_fork_neither_writes_nor_removes_what_its_parent_records(tmp_path: Path) -> None:
    found = {}
    for how, count in FORKS.items():
        if how == "workers":
            continue  # A data loader computes in the parent as well.
        folder = tmp_path / how
        folder.mkdir()
        done = run(folder, PROGRAM + APPLIED, None, how, folder / "out")
        assert done.stdout.splitlines()[-1] == str(said(count))
        found[how] = without_times(folder / "out")
        assert any(name.endswith(".npz") for name in found[how])
    assert found["bare"] == found["none"]
    assert found["processes"] == found["none"]


@pytest.mark.parametrize("how", FORKS)
def test_a_run_says_how_many_processes_had_no_tools(how: str, tmp_path: Path) -> None:
    program = PROGRAM + "\n    run(sys.argv[1])\n"
    done = run(tmp_path, program, "run", "-t", "trace", "-o", "out", None, how)
    (file,) = (tmp_path / "out").rglob("*.json")
    result = json.loads(file.read_text())
    assert [op["calls"] for op in result["ops"] if op["type"] == "linear"] == [3]
    assert result["notes"] == said(FORKS[how])
    assert all(line in done.stderr for line in said(FORKS[how]))


def test_a_run_in_which_only_forks_compute_says_what_to_do(tmp_path: Path) -> None:
    program = PROGRAM.replace("model = ", "make = lambda: ").replace("model(", "make()(")
    program += '\n    forked("processes")\n'
    done = run(tmp_path, program, "run", "-t", "trace", "-o", "out", None)
    assert "processes that it forked run without tools" in done.stderr, done.stderr


#: Starts processes under a tool, in each way, and prints what was not seen.
STARTED = """
    import os, subprocess, sys, torch, torch.multiprocessing
    from torch.multiprocessing import get_context
    import amanda
    from amanda_tools.trace import Trace

    def work(*_):
        torch.ones(1)

    if __name__ == "__main__":
        own = subprocess.Popen.__init__, torch.multiprocessing.Process.start
        for how in ("spawn", "processes", "programs", "others", "told"):
            os.environ.pop("AMANDA_CHILDREN", None)
            with amanda.apply(tool := Trace()):
                if how == "spawn":
                    torch.multiprocessing.spawn(work, nprocs=2)
                elif how == "processes":
                    one = get_context("spawn").Process(target=work)
                    one.start()
                    one.join()
                elif how == "programs":
                    subprocess.run([sys.executable, "-c", "1"])
                    subprocess.run(f"{sys.executable} -c 1", shell=True)
                    assert subprocess.check_output([sys.executable, "-c", "print(1)"]) == b"1\\n"
                elif how == "others":
                    subprocess.run(["true"])
                else:
                    told = {**os.environ, "AMANDA_CHILDREN": ""}
                    subprocess.run([sys.executable, "-c", "1"], env=told)
            print(how, *tool.not_seen())
        assert own == (subprocess.Popen.__init__, torch.multiprocessing.Process.start)
"""


def test_processes_that_get_no_tools_are_counted(tmp_path: Path) -> None:
    done = run(tmp_path, STARTED, None)
    end = "that the program started got no tools from here: `amanda run` gives them to all"
    counts = {"spawn": "2 processes", "processes": "a process", "programs": "3 processes"}
    wanted = [f"{how} {count} {end}" for how, count in counts.items()]
    assert done.stdout.splitlines() == [*wanted, "others", "told"]
