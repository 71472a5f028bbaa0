"""`amanda run`: a program sees what it sees under plain python, however it ends.

The module is long because all of its programs run in one installation.
"""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

from amanda_core.processes.launched import Process

from .site import OTHERS, Site

MODEL = """
import toyframe

def model(count=1):
    x = toyframe.Value(2.0)
    for _ in range(count):
        with toyframe.scope("encoder"):
            x = toyframe.relu(x)
        toyframe.update([], 0.1)
"""
FACTS = """
import builtins, sys
from sys import argv, path
print(argv, path[0], __name__, __file__, __package__, __cached__)
print(type(__loader__).__name__, __spec__ and (__spec__.name, __spec__.parent, __spec__.origin))
print(sorted(globals()), __builtins__ is builtins, __doc__)
print(vars(sys.modules["__main__"]) is globals())
def annotated(x: int): ...
print(annotated.__annotations__)
"""
PROGRAMS = {
    "facts": f'"""What it is."""{FACTS}',
    "stdin": "print(input() + input())",
    "binary": "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())",
    "error": "def f():\n    1 / 0\nf()\n",
    "chained": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('two') from e\n",
    "context": "try:\n    {}['a']\nexcept KeyError:\n    raise ValueError('two')\n",
    "syntax": "x = 1\nif x\n",
    "coding": "# -*- coding: latin-1 -*-\nprint('a')\n",
    "hook": "import sys\nsys.excepthook = lambda *a: print('mine', a[1])\n1 / 0\n",
    "failing hook": "import sys\ndef hook(*a): raise KeyError('h')\nsys.excepthook = hook\n1 / 0\n",
    "exiting hook": "import sys\nsys.excepthook = lambda *a: sys.exit(7)\n1 / 0\n",
    "exit": "import sys; sys.exit()",
    "exit 3": "import sys; sys.exit(3)",
    "exit text": "import sys; sys.exit('that is all')",
    "exit tuple": "import sys; sys.exit((1, 2))",
    "exit true": "import sys; sys.exit(True)",
    "exit 256": "import sys; sys.exit(257)",
    "exit -1": "raise SystemExit(-1)",
    "exit in finally": "import sys\ntry:\n    1 / 0\nfinally:\n    sys.exit(4)\n",
    "base": "class Own(BaseException): pass\nraise Own('x')\n",
    "generator exit": "raise GeneratorExit",
    "atexit": "import atexit; atexit.register(print, 'last'); print('first'); 1 / 0",
    "thread": (
        "import threading, time\n"
        "def late(): time.sleep(0.2); print('late')\n"
        "threading.Thread(target=late).start()\nprint('main')\n"
    ),
    "thread error": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='T')\n"
    "t.start(); t.join()\n",
    "pickle": "import pickle\nclass C:\n    x = 1\nprint(pickle.loads(pickle.dumps(C())).x, C)\n",
    "source": "import inspect\nclass C:\n    x = 1\nprint(inspect.getsource(C))\n",
    "warning": "import warnings; warnings.warn('old', DeprecationWarning)",
    "recursion": "def f(n): return n and f(n - 1)\nprint(f(900))\n",
    "spawn": (
        "import multiprocessing as m\nclass C:\n    x = 5\ndef f(c): return c.x\n"
        "if __name__ == '__main__':\n"
        "    with m.get_context('spawn').Pool(1) as p:\n        print(p.map(f, [C()]))\n"
    ),
    "fork": (
        "import os, sys\npid = os.fork()\nif not pid: sys.exit(5)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    ),
    "forked error": (
        "import os, sys\npid = os.fork()\nif not pid: 1 / 0\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    ),
    "interrupt": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n",
    "own interrupt": "raise KeyboardInterrupt('mine')",
    "caught interrupt": (
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    print('caught')\n"
    ),
    "own handler": (
        "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: print('handled'))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    ),
    "own handler, then a wait": (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, lambda *_: print('handled'))\n"
        "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(0.8)\n"
    ),
    "term": "import os, signal\nprint('a', flush=True)\nos.kill(os.getpid(), signal.SIGTERM)\n",
    "forked term": (
        "import os, signal, time\npid = os.fork()\nif not pid: time.sleep(60); os._exit(9)\n"
        "os.kill(pid, signal.SIGTERM)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    ),
    "closed": "import sys\nsys.stderr.close()\nprint(1)\n",
}
CALL = """
import sys
from amanda_core.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    made = Site(tmp_path_factory.mktemp("site"))
    # What pip makes of the entry point.
    (made.path / "amanda-program").write_text(CALL)
    (made.path / "toymodel.py").write_text(MODEL)
    return made


@pytest.fixture
def out(site: Site, request: pytest.FixtureRequest) -> Path:
    return site.work / "".join(c if c.isalnum() else "_" for c in request.node.name)


def calls(out: Path, name: str = "count") -> dict[str, int]:
    found: dict[str, int] = json.loads((out / f"{name}.json").read_text())["calls"]
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if number % 2 else name
        for number, name in enumerate(PROGRAMS)
    ],
)
def test_a_script_runs_as_under_plain_python(site: Site, name: str, out: Path) -> None:
    script = site.write("script.py", PROGRAMS[name])
    arguments = [script.name, "--epochs", "1", "-t", "x", "--", "-m"]
    stdin = "one\ntwo\n"
    plain = site.python(*arguments, stdin=stdin)
    under = site.amanda("run", "-q", "-t", "count", "-o", str(out), *arguments, stdin=stdin)
    assert under.stdout == plain.stdout
    assert under.stderr == plain.stderr
    assert under.returncode == plain.returncode
    assert (out / "count.json").is_file()


@pytest.mark.parametrize("safe", ["", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["script", "folder", "zip", "module", "package", "submodule"])
def test_every_way_to_start_a_program(site: Site, out: Path, how: str, safe: str) -> None:
    site.write("facts.py", FACTS)
    site.write("pack/__init__.py", "print('imported')\n")
    site.write("pack/__main__.py", FACTS)
    site.write("pack/sub.py", FACTS + "from . import __main__\n1 / 0\n")
    site.write("other/script.py", FACTS)
    with zipfile.ZipFile(site.work / "app.zip", "w") as archive:
        archive.writestr("__main__.py", FACTS)
    arguments = {
        "script": ["other/script.py"],
        "folder": ["pack"],
        "zip": ["app.zip"],
        "module": ["-m", "facts"],
        "package": ["-m", "pack"],
        "submodule": ["-m", "pack.sub"],
    }[how]
    variables = {"PYTHONSAFEPATH": safe, "PYTHONDONTWRITEBYTECODE": "1"}
    if (safe and "module" in how) or (safe and how == "package"):
        given = site.environment()["PYTHONPATH"]
        variables["PYTHONPATH"] = f"{given}{os.pathsep}{site.work}"
    plain = site.python(*arguments, "a", "-b", **variables)
    program = str(site.path / "amanda-program")
    ours = ["run", "-q", "-t", "count", "-o"]
    by_module = site.amanda(*ours, str(out), *arguments, "a", "-b", **variables)
    by_program = site.python(program, *ours, f"{out}2", *arguments, "a", "-b", **variables)
    assert by_module.stdout == by_program.stdout == plain.stdout
    assert by_module.returncode == by_program.returncode == plain.returncode
    # -m shows the frames of runpy too; not ours to imitate.
    frames = re.sub(r'  File "[^"]*runpy[^"]*".*\n(    .*\n)?', "", plain.stderr)
    expected = frames.splitlines()
    assert by_module.stderr.splitlines() == by_program.stderr.splitlines() == expected


def test_a_command_in_python_is_found_as_a_shell_finds_it(site: Site) -> None:
    program = "import sys, toyframe\ntoyframe.relu(toyframe.Value(1.0))\nprint(sys.argv)\n"
    (site.path / "bin").mkdir()
    for name, text in (("launch", f"#!{sys.executable}\n{program}"), ("mpi", "#!/bin/sh\n")):
        path = site.path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    (site.work / "pyproject.toml").write_text("[tool.amanda]\noutput = 'set'\n")
    where = {"PATH": f"{site.path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = site.amanda("run", "-t", "count", "launch", "-n", "2", **where)
    assert done.stdout.splitlines()[-1] == str([str(site.path / "bin/launch"), "-n", "2"])
    # The configuration is that of the current folder.
    assert (site.work / "set/count.json").exists()
    (site.work / "pyproject.toml").unlink()  # Other tests use the folder.
    done = site.run("mpi", "-n", "2", **where)
    assert done.returncode == 2
    assert "'mpi' is not Python's" in done.stderr
    assert "amanda run` in each" in done.stderr
    # A path is not a command.
    assert "can't open file" in site.run("./launch", **where).stderr


def test_a_program_that_is_not_there(site: Site) -> None:
    done = site.run("nowhere.py")
    assert done.returncode == 2
    assert "can't open file" in done.stderr
    assert "nowhere.py" in done.stderr
    done = site.run("--force", "-m", "nowhere")
    assert done.returncode == 1
    assert f"{sys.executable}: No module named nowhere" in done.stderr
    site.write("empty/readme.txt", "")
    done = site.run("--force", "empty")
    assert done.returncode == site.python("empty").returncode
    assert f"can't find '__main__' module in {str(site.work / 'empty')!r}" in done.stderr


def test_operators_of_a_framework_that_the_script_imports_are_seen(site: Site, out: Path) -> None:
    site.write("train.py", "import toymodel\ntoymodel.model(3)\nprint('mine')\n")
    done = site.amanda("run", "-t", "count:label=a b", "-o", str(out), "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "mine\n"
    assert calls(out) == {"encoder/relu": 3}
    assert done.stderr.splitlines() == [
        "amanda: running train.py under count",
        "amanda: warning: The toy framework is a toy. Use a real one",  # Its driver's preflight.
        "count",
        "op            calls",
        "encoder/relu      3",
        f"amanda: count: {out}/count.json",
    ]


def test_two_tools_one_of_them_twice(site: Site, out: Path) -> None:
    site.write("train.py", "import toymodel\ntoymodel.model(2)\n")
    flags = ["-t", "count:sparsity=0.25,layers=[1,2]", "-t", "again=count:norm=l2,mode=slow"]
    done = site.amanda("run", *flags, "-o", str(out), "train.py")
    assert done.returncode == 0, done.stderr
    first = json.loads((out / "count.json").read_text())["options"]
    second = json.loads((out / "again.json").read_text())["options"]
    assert (first["sparsity"], first["layers"], first["norm"]) == (0.25, [1, 2], "l1")
    assert (second["sparsity"], second["norm"], second["mode"]) == (0.5, "l2", "Mode.SLOW")
    assert calls(out, "again") == {"encoder/relu": 2}


def test_a_tool_of_ones_own_by_file_and_by_module(site: Site, out: Path) -> None:
    site.write("own/mine.py", "from toytools import Counter\nclass Mine(Counter):\n    pass\n")
    site.write("own/train.py", "import toymodel\ntoymodel.model()\n")
    for number, tool in enumerate(["own/mine.py:Mine:sparsity=0.1", "mine:Mine:sparsity=0.1"]):
        folder = f"{out}{number}"
        done = site.amanda("run", "-t", tool, "-o", folder, "own/train.py")
        assert done.returncode == 0, done.stderr
        assert calls(Path(folder), "Mine") == {"encoder/relu": 1}


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)],
)
def test_a_signal_from_outside_ends_it_with_results(
    site: Site, out: Path, number: signal.Signals
) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup, and so by programs")
    site.write(
        "long.py",
        "import time, toymodel\ntoymodel.model(4)\ntry:\n    print('ready', flush=True)\n"
        "    time.sleep(60)\nfinally:\n    print('unwound', flush=True)\n",
    )
    process = site.start("-m", "amanda", "run", "-t", "count", "-o", str(out), "long.py")
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == -number
    assert calls(out) == {"encoder/relu": 4}
    # The other signals unwind nothing under plain python either.
    assert stdout == ("unwound\n" if number == signal.SIGINT else "")
    assert "encoder/relu" in stderr
    assert ("KeyboardInterrupt" in stderr) == (number == signal.SIGINT)
    assert "amanda_core" not in stderr


@pytest.mark.slow
def test_a_signal_waits_while_results_are_written(site: Site, out: Path) -> None:
    site.write(
        "slow.py",
        "import time\nfrom toytools import Counter\nclass Slow(Counter):\n"
        "    def result(self):\n        print('writing', flush=True)\n        time.sleep(1)\n"
        "        return super().result()\n",
    )
    site.write("train.py", "import toymodel\ntoymodel.model(4)\n")
    tool = f"{site.work / 'slow.py'}:Slow:sparsity=0.1"
    process = site.start("-m", "amanda", "run", "-t", tool, "-o", str(out), "train.py")
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert calls(out, "Slow") == {"encoder/relu": 4}


@pytest.mark.slow
def test_runs_at_once_never_share_a_folder(site: Site, out: Path) -> None:
    here = copy.copy(site)
    here.work = out
    here.write("train.py", "import toymodel\ntoymodel.model(2)\n")
    here.write(
        "wait.py",
        "import pathlib, time, toymodel\ntoymodel.model(4)\nprint('ready', flush=True)\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.05)\n",
    )
    given = ["run", "-q", "-t", "count"]
    with (
        here.start("-m", "amanda", *given, "wait.py") as default,
        here.start("-m", "amanda", *given, "-o", "named", "wait.py") as named,
    ):
        for process in (default, named):
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        done = here.amanda(*given, "train.py")
        assert done.returncode == 0, done.stderr
        for tool, force in (("count", []), ("again=count", ["--force"])):
            done = here.amanda("run", "-t", tool, "-o", "named", *force, "train.py")
            assert done.returncode == 2
            assert "named' is the output folder of a run that has not ended" in done.stderr
        named.kill()
        named.wait()
        here.write("go", "")
    assert calls(out / "amanda_results") == {"encoder/relu": 4}
    assert calls(out / "amanda_results-2") == {"encoder/relu": 2}
    # A run that was killed keeps nobody out, but its results are not replaced unasked.
    done = here.amanda(*given, "--force", "-o", "named", "train.py")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (out / "named").iterdir()] == ["count.json"]


@pytest.mark.slow
def test_processes_of_two_launchers_never_share_a_folder(site: Site, out: Path) -> None:
    here = copy.copy(site)
    here.work = out
    here.write("train.py", "import toymodel\ntoymodel.model(2)\n")
    for port, rank in (("1", "0"), ("2", "1"), ("1", "1"), ("2", "0")):
        launched = {"RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        done = here.amanda("run", "-q", "-t", "count", "train.py", **launched)
        assert done.returncode == 0, done.stderr
    for folder, port in (("amanda_results", "1"), ("amanda_results-2", "2")):
        found = sorted(path.parent.name for path in (out / folder).rglob("count.json"))
        assert found == ["rank0", "rank1"]
        assert (out / folder / ".amanda-launched").read_text() == f"localhost {port}"


def test_the_error_of_a_program_comes_last_and_once(site: Site, out: Path) -> None:
    site.write("fail.py", "import toymodel\ntoymodel.model()\nraise ValueError('its own')\n")
    done = site.amanda("run", "-t", "count", "-o", str(out), "fail.py")
    assert done.returncode == 1
    assert done.stderr.index("encoder/relu") < done.stderr.index("Traceback")
    assert done.stderr.endswith("ValueError: its own\n")
    assert done.stderr.count("its own") == 2  # The line of the program, and the message.
    assert "running.py" not in done.stderr
    assert "program.py" not in done.stderr
    assert calls(out) == {"encoder/relu": 1}


def test_an_empty_result_is_one_line_after_an_error(site: Site, out: Path) -> None:
    site.write("early.py", "import toyframe\nraise ValueError('its own')\n")
    done = site.amanda("run", "-t", "count", "-o", str(out), "early.py")
    assert f"amanda: count: nothing of it ran: {out}/count.json" in done.stderr
    assert "calls" not in done.stderr  # The heading of the table.
    assert done.stderr.endswith("ValueError: its own\n")


def test_a_hook_of_the_program_shows_its_error_after_the_results(site: Site, out: Path) -> None:
    site.write(
        "hooked.py",
        "import sys, toymodel\ntoymodel.model()\n"
        "sys.excepthook = lambda kind, *_: (print('own hook', kind.__name__), sys.exit(7))\n"
        "raise ValueError\n",
    )
    done = site.amanda("run", "-t", "count", "-o", str(out), "hooked.py")
    assert (done.returncode, done.stdout) == (7, "own hook ValueError\n")
    assert calls(out) == {"encoder/relu": 1}


def test_results_of_a_fork_are_its_parents(site: Site, out: Path) -> None:
    site.write(
        "fork.py",
        "import os, sys, toymodel\ntoymodel.model(2)\npid = os.fork()\n"
        "if not pid:\n    toymodel.model(5)\n    sys.exit(0)\nos.waitpid(pid, 0)\n",
    )
    done = site.amanda("run", "-t", "count", "-o", str(out), "fork.py")
    assert done.stderr.count("encoder/relu") == 1
    assert calls(out) == {"encoder/relu": 2}


def test_code_comes_on_top(site: Site, out: Path) -> None:
    site.write(
        "apply.py",
        "import amanda, toymodel\nfrom toytools import Counter\ninner = Counter()\n"
        "toymodel.model(1)\nwith amanda.apply(inner):\n    toymodel.model(2)\n"
        "print(inner.calls)\n",
    )
    done = site.amanda("run", "-t", "count", "-o", str(out), "apply.py")
    assert done.stdout == "{'encoder/relu': 2}\n"
    assert calls(out) == {"encoder/relu": 3}


def test_each_rank_writes_its_own_result(site: Site, out: Path) -> None:
    site.write("train.py", "import toymodel\ntoymodel.model()\n")
    for rank in ("0", "3"):
        done = site.amanda("run", "-t", "count", "-o", str(out), "train.py", RANK=rank)
        assert done.returncode == 0, done.stderr
        assert calls(out / f"rank{rank}") == {"encoder/relu": 1}
        # One table is enough for all of them.
        assert ("encoder/relu" in done.stderr) == (rank == "0")
        assert f"rank{rank}/count.json" in done.stderr
    again = {"RANK": "3", "TORCHELASTIC_RESTART_COUNT": "2"}
    done = site.amanda("run", "-t", "count", "-o", str(out), "train.py", **again)
    assert calls(out / "rank3-restart2") == {"encoder/relu": 1}
    done = site.amanda("run", "-t", "count", "-o", str(out), "train.py", RANK="../3")
    assert done.returncode == 2
    assert "RANK is '../3', which is not a number" in done.stderr


@pytest.mark.parametrize(
    "launched",
    [
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
        {"FRAME_PROCESS_ID": "1", "FRAME_NUM_PROCESSES": "2"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "RANK": "1"},
        {
            "TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, '
            '"task": {"type": "worker", "index": 1}}'
        },
        {
            "TF_CONFIG": '{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, '
            '"task": {"type": "worker", "index": 0}}'
        },
    ],
)
def test_the_number_of_a_process_is_what_its_launcher_says(
    launched: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert Process.of_environment().part == "rank1"


@pytest.mark.parametrize(
    "launched",
    [
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"FRAME_PROCESS_ID": "1"},
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'},
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "evaluator"}}'},
    ],
)
def test_a_single_process_has_no_number(
    launched: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert Process.of_environment().part == ""


def test_results_that_are_there_are_not_replaced_unless_forced(site: Site, out: Path) -> None:
    site.write("train.py", "import toymodel\nprint('ran')\ntoymodel.model()\n")
    out.mkdir()
    (out / "count.json").write_text("precious")
    done = site.amanda("run", "-t", "count", "-o", str(out), "train.py")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "has results already: count.json. Name another folder with -o, or" in done.stderr
    assert (out / "count.json").read_text() == "precious"
    done = site.amanda("run", "-t", "count", "-o", str(out), "--force", "train.py")
    assert done.returncode == 0
    assert calls(out) == {"encoder/relu": 1}


def test_without_a_folder_each_run_gets_its_own(site: Site) -> None:
    site.write("train.py", "import toymodel\ntoymodel.model()\n")
    for name in ("amanda_results", "amanda_results-2", "amanda_results-3"):
        done = site.amanda("run", "-t", "count", "train.py")
        assert f"{name}/count.json" in done.stderr
        assert calls(site.work / name) == {"encoder/relu": 1}
    # Also of another tool: a report of two runs would show what was never together.
    (site.work / "amanda_results-3" / "count.json").rename(
        site.work / "amanda_results-3" / "other.json"
    )
    assert "amanda_results-4/count.json" in site.amanda("run", "-t", "count", "train.py").stderr


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("failing", "the result of 'failing' is not written: RuntimeError: no result today"),
        ("count:escape=../x.txt", "outside of its folder"),
        ("count:escape=link", "outside of its folder"),
    ],
)
@pytest.mark.parametrize("code", [0, 3])
def test_a_result_that_cannot_be_written_is_told_and_fails_a_good_run(
    site: Site, out: Path, tool: str, message: str, code: int
) -> None:
    site.write("end.py", f"import sys; sys.exit({code})")
    done = site.amanda("run", "-t", tool, "-o", str(out), "end.py")
    assert message in done.stderr
    assert done.returncode == (code or 1)


def test_the_error_of_a_routine_is_the_programs(site: Site, out: Path) -> None:
    site.write(
        "mine.py",
        "import amanda\nclass Bad(amanda.Tool):\n    def __init__(self):\n"
        "        self.add_inst_for_op(self.analyse)\n"
        "    def analyse(self, context):\n        raise ZeroDivisionError('in a routine')\n",
    )
    site.write("train.py", "import toymodel\ntoymodel.model()\n")
    done = site.amanda("run", "-t", "mine.py:Bad", "-o", str(out), "train.py")
    assert done.returncode == 1
    assert "ZeroDivisionError: in a routine" in done.stderr
    assert "train.py" in done.stderr
    assert "cli/running.py" not in done.stderr


def test_values_that_two_tools_change_are_named(site: Site, out: Path) -> None:
    site.write(
        "doubling.py",
        "import amanda\nfrom toyframe import Value\nclass Doubling(amanda.Tool):\n"
        "    def __init__(self):\n        self.add_inst_for_op(self.analyse)\n"
        "    def analyse(self, context):\n"
        "        context.insert_after_op(lambda x: Value(2 * x.data))\n",
    )
    site.write("train.py", "import toymodel\ntoymodel.model()\n")
    tools = ["-t", "doubling.py:Doubling", "-t", "again=doubling.py:Doubling"]
    done = site.amanda("run", *tools, "-o", str(out), "train.py")
    assert done.returncode == 0
    (warning,) = (line for line in done.stderr.splitlines() if "changed value" in line)
    assert warning.startswith("amanda: warning: encoder/relu at toymodel.py:")
    assert "insert_after_op of Doubling, then of Doubling" in warning


def test_quiet_writes_results_and_says_nothing(site: Site, out: Path) -> None:
    site.write("train.py", "import toymodel\ntoymodel.model()\n")
    done = site.amanda("run", "-q", "-t", "count", "-o", str(out), "train.py")
    assert (done.stdout, done.stderr) == ("", "")
    assert calls(out) == {"encoder/relu": 1}


def test_selection_by_flags(site: Site, out: Path) -> None:
    site.write(
        "train.py",
        "import toyframe as t\nfor _ in range(4):\n"
        "    t.relu(t.add(t.Value(1.0), t.Value(2.0)))\n    t.update([], 0.1)\n",
    )
    base = ["run", "-t", "count"]
    for number, (flags, expected) in enumerate(
        [
            ([], {"add": 4, "relu": 4}),
            (["--ops", "re*"], {"relu": 4}),
            (["--ops", "re*", "--ops", "add", "--steps", "1:3"], {"add": 2, "relu": 2}),
            (["--modules", "encoder*"], {}),
        ]
    ):
        folder = f"{out}{number}"
        done = site.amanda(*base, *flags, "-o", folder, "train.py")
        assert done.returncode == 0, done.stderr
        assert calls(Path(folder)) == expected


@pytest.mark.parametrize(
    ("works_on", "changes", "starts"),
    [
        (("elsewhere/*/*", "nowhere/*/eager"), "True", False),
        (("elsewhere/*/*", "nowhere/*/eager"), "None", False),
        (("elsewhere/*/*",), "False", True),
        (("elsewhere/*/*", "toy/*/*"), "True", True),
        (("*/*/eager",), "True", True),
        ((), "True", True),
    ],
)
def test_a_tool_that_edits_needs_a_driver_of_a_framework_that_it_works_on(
    site: Site, out: Path, works_on: tuple[str, ...], changes: str, starts: bool
) -> None:
    site.write(
        "own.py",
        "import amanda\n"
        "class Own(amanda.Tool):\n"
        f"    works_on = {works_on!r}\n"
        f"    changes_values = {changes}\n",
    )
    site.write("train.py", "print('started')\n")
    ended = site.amanda("run", "-t", "own.py:Own", "-o", str(out), "train.py")
    assert ("started" in ended.stdout) is starts, ended.stderr
    if not starts:
        assert ended.returncode == 2
        assert "works on elsewhere and nowhere, of which no driver is installed" in ended.stderr
        assert not out.exists()


@pytest.mark.parametrize(
    ("program", "flags", "told"),
    [
        ("print(1)", [], "no framework of those that `amanda drivers` lists"),
        ("import toyframe", [], "ran none of toy in the thread"),
        (
            "import toymodel\ntoymodel.model()",
            ["--ops", "conv*"],
            "select(op=('conv*',)) has none of those that ran (encoder/relu). Widen --ops",
        ),
        (
            "import toymodel\ntoymodel.model()",
            ["--steps", "9:"],
            "select(steps=slice(9, None, None)) has none",
        ),
        ("import toymodel\ntoymodel.model()", [], ""),
    ],
    ids=["no framework", "no operator", "an op that never runs", "a step too late", "all is well"],
)
def test_a_tool_without_operators_is_named(
    site: Site, out: Path, program: str, flags: list[str], told: str
) -> None:
    site.write("train.py", program)
    done = site.amanda("run", "-t", "count", *flags, "-o", str(out), "train.py")
    assert done.returncode == 0, done.stderr
    assert ("amanda: warning: count was given no operator: " in done.stderr) == bool(told)
    assert told in done.stderr


def test_a_driver_that_declined_is_named(site: Site, out: Path) -> None:
    plugin = site.path / "toyplugin.py"
    plugin.write_text(plugin.read_text().replace('if "toyframe" not in sys.modules', "if True"))
    site.write("train.py", "import toyframe\n")
    done = site.amanda("run", "-t", "count", "-o", str(out), "train.py")
    assert done.returncode == 0, done.stderr
    assert "toyframe is loaded, but its driver 'toy' does not attach to it" in done.stderr
    assert "toyframe (driver toy) was loaded, but its driver did not attach" in done.stderr
    assert "no framework" not in done.stderr


def test_a_driver_that_is_not_asked_for_does_not_attach(site: Site, out: Path) -> None:
    site.write("train.py", "import toymodel\ntoymodel.model()\n")
    done = site.amanda("run", "-t", "count", "--drivers", "tay", "-o", str(out), "train.py")
    assert done.returncode == 2
    assert "No driver 'tay' is installed; there are: toy. Where: --drivers." in done.stderr
    done = site.amanda("run", "-t", "count", "--drivers", "toy", "-o", str(out), "train.py")
    assert done.returncode == 0, done.stderr
    blocked: dict[str, Any] = {"AMANDA_DISABLE_PLUGINS": f"toy,{OTHERS}"}
    done = site.amanda("run", "-t", "count", "-o", f"{out}2", "train.py", **blocked)
    assert done.returncode == 2
    assert "AMANDA_DISABLE_PLUGINS blocks" in done.stderr


def test_configuration_environment_and_flags(site: Site, out: Path) -> None:
    folder = out
    config = """
    [tool.amanda]
    output = "from_file"
    [tool.amanda.tools.count]
    sparsity = 0.25
    rounds = 3
    label = "file"
    where = "data"
    select = { ops = "relu" }
    [tool.amanda.tools.second]
    tool = "count"
    [tool.amanda.tools.off]
    tool = "count"
    enable = false
    """
    site.write(f"{folder.name}/pyproject.toml", textwrap.dedent(config))
    site.write(f"{folder.name}/deep/train.py", "import toymodel\ntoymodel.model()\n")
    script = f"{folder.name}/deep/train.py"
    assert site.amanda("run", script).returncode == 0
    written = folder / "from_file"
    assert sorted(path.name for path in written.iterdir()) == ["count.json", "second.json"]
    options = json.loads((written / "count.json").read_text())["options"]
    assert (options["sparsity"], options["rounds"], options["label"]) == (0.25, 3, "file")
    assert options["where"] == str(folder / "data")
    # A folder that is named for all runs: the next one has a number.
    done = site.amanda("run", script)
    assert done.returncode == 0
    assert f"{folder}/from_file-2/count.json" in done.stderr
    assert sorted(path.name for path in written.iterdir()) == ["count.json", "second.json"]

    environment = {"AMANDA_TOOLS": "count:rounds=4,label=env", "AMANDA_OUTPUT": f"{folder}/env"}
    assert site.amanda("run", script, **environment).returncode == 0
    assert [path.name for path in (folder / "env").iterdir()] == ["count.json"]
    options = json.loads((folder / "env" / "count.json").read_text())["options"]
    assert (options["sparsity"], options["rounds"], options["label"]) == (0.25, 4, "env")

    flags = ["-t", "off", "-t", "count:label=flag", "-o", f"{folder}/flag"]
    assert site.amanda("run", *flags, script, **environment).returncode == 0
    assert sorted(p.name for p in (folder / "flag").iterdir()) == ["count.json", "off.json"]
    options = json.loads((folder / "flag" / "count.json").read_text())["options"]
    assert (options["sparsity"], options["rounds"], options["label"]) == (0.25, 4, "flag")

    done = site.amanda("run", "--no-config", script)
    assert done.returncode == 2
    assert "No tool is named" in done.stderr
