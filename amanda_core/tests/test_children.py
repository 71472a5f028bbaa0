"""Python programs that a program under `amanda run` starts, which run under the same tools."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from amanda_core.results.run_state import RunState

from .site import Site

MODEL = """
import json, os, signal, subprocess, sys, time

def model(count):
    import toyframe  # The tools start here.
    for _ in range(count):
        with toyframe.scope("encoder"):
            toyframe.relu(toyframe.Value(2.0))

def launch(*ranks, program="rank.py", **variables):
    size = {"WORLD_SIZE": str(len(ranks))}
    made = [
        subprocess.Popen(
            [sys.executable, program], env={**os.environ, "RANK": str(rank), **size, **variables}
        )
        for rank in ranks
    ]
    return [process.wait() for process in made]
"""
RANK = "import os\nfrom launching import model\nmodel(10 + int(os.environ['RANK']))\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    made = Site(tmp_path_factory.mktemp("site"))
    (made.path / "launching.py").write_text(MODEL)
    made.write("rank.py", RANK)
    return made


@pytest.fixture
def out(site: Site, request: pytest.FixtureRequest) -> Path:
    return site.work / "".join(c if c.isalnum() else "_" for c in request.node.name)


def found(out: Path) -> dict[str, int]:
    """Return how often the operator ran, by the folder in the folder of results."""
    return {
        path.parent.relative_to(out).as_posix(): json.loads(path.read_text())["calls"].get(
            "encoder/relu", 0
        )
        for path in sorted(out.rglob("count.json"))
    }


def run(site: Site, out: Path, program: str, *flags: str) -> str:
    """Run a program under the tool; return its stdout."""
    site.write(f"{out.name}.py", f"from launching import *\n{program}")
    done = site.amanda("run", "-t", "count", "-o", str(out), *flags, f"{out.name}.py")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ranks_that_the_program_starts_have_results_of_their_own(site: Site, out: Path) -> None:
    assert run(site, out, "print(launch(0, 1, 2))\n") == "[0, 0, 0]\n"
    assert found(out) == {"rank0": 10, "rank1": 11, "rank2": 12}
    states = [RunState.read(out / f"rank{rank}") for rank in range(3)]
    assert [(state.rank, state.processes, state.ended) for state in states if state] == [
        (rank, 3, True) for rank in range(3)
    ]
    # A second run does not mix its results with these, unless it is to replace them.
    again = site.amanda("run", "-t", "count", "-o", str(out), f"{out.name}.py")
    assert again.returncode == 2
    assert "has results already: rank0" in again.stderr
    run(site, out, "print(launch(0, 1))\nmodel(1)\n", "--force")
    assert found(out) == {".": 1, "rank0": 10, "rank1": 11}


@pytest.mark.slow
def test_children_without_a_rank_are_numbered_and_helpers_leave_nothing(
    site: Site, out: Path
) -> None:
    program = (
        "model(1)\n"
        "for code in ('model(2)', 'model(3); sys.exit(4)', 'import toyframe', 'pass',\n"
        "             'model(4); os._exit(5)'):\n"
        "    code = 'from launching import *; ' + code\n"
        "    print(subprocess.run([sys.executable, '-c', code]).returncode)\n"
    )
    assert run(site, out, program) == "0\n4\n0\n0\n5\n"
    assert found(out) == {".": 1, "process-1": 2, "process-2": 3, "process-3": 4}


@pytest.mark.slow
def test_a_child_of_a_rank_is_not_taken_for_the_rank(site: Site, out: Path) -> None:
    site.write(
        "starts.py",
        "from launching import *\nmodel(5)\n"
        "subprocess.run([sys.executable, '-c', 'from launching import *; model(6)'])\n",
    )
    run(site, out, "launch(0, 1, program='starts.py')\n")
    assert found(out) == {
        "rank0": 5,
        "rank0/process-1": 6,
        "rank1": 5,
        "rank1/process-1": 6,
    }


@pytest.mark.slow
def test_processes_of_multiprocessing_that_are_spawned(site: Site, out: Path) -> None:
    program = (
        "import multiprocessing\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    made = [context.Process(target=model, args=(n,)) for n in (3, 4)]\n"
        "    [one.start() for one in made]\n    [one.join() for one in made]\n"
        "    print([one.exitcode for one in made])\n"
    )
    assert run(site, out, program) == "[0, 0]\n"
    assert found(out) == {"process-1": 3, "process-2": 4}


@pytest.mark.slow
def test_no_children(site: Site, out: Path) -> None:
    assert run(site, out, "model(1)\nprint(launch(0))\n", "--no-children") == "[0]\n"
    assert found(out) == {".": 1}


@pytest.mark.slow
def test_tools_from_files_and_a_configuration_are_those_of_the_program(
    site: Site, out: Path
) -> None:
    """Also in a child with another working folder and a script elsewhere."""
    (out / "inner").mkdir(parents=True)
    (out / "pyproject.toml").write_text("[tool.amanda.tools.count]\nlabel = 'configured'\n")
    (out / "beside.py").write_text(
        "from toytools import Counter\nclass Beside(Counter):\n    pass\n"
    )
    (out / "inner/rank.py").write_text(RANK)
    (out / "main.py").write_text(
        "from launching import *\nos.chdir('inner')\nprint(launch(0))\n",
    )
    flags = ("-t", "count", "-t", "beside.py:Beside", "-t", "again=beside:Beside")
    arguments = [sys.executable, "-m", "amanda", "run", *flags, "-o", "results", "main.py"]
    done = subprocess.run(
        arguments, cwd=out, env=site.environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "[0]\n", done.stderr
    for name in ("count", "Beside", "again"):
        content = json.loads((out / f"results/rank0/{name}.json").read_text())
        assert content["calls"] == {"encoder/relu": 10}
    assert json.loads((out / "results/rank0/count.json").read_text())["options"]["label"] == (
        "configured"
    )


def test_the_own_sitecustomize_of_a_child_runs_and_sees_nothing_of_ours(
    site: Site, out: Path
) -> None:
    out.mkdir()
    (out / "sitecustomize.py").write_text(
        "import sys\nsys.own = [p for p in sys.path if 'startup' in p]\n"
    )
    child = (
        "import sys, sitecustomize\n"
        "print(sys.own, sitecustomize.__file__, [f for f in sys.path if 'startup' in f])\n"
        "from launching import model\nmodel(2)\n"
        "print(type(sys.modules['toyframe'].__loader__).__name__)\n"
    )
    site.write("child.py", child)
    program = (
        f"path = os.environ['PYTHONPATH'].split(os.pathsep) + [{str(out)!r}]\n"
        "launch(0, program='child.py', PYTHONPATH=os.pathsep.join(path))\n"
    )
    assert run(site, out / "r", program).splitlines() == [
        f"[] {out / 'sitecustomize.py'} []",
        "SourceFileLoader",
    ]
    assert found(out / "r") == {"rank0": 2}


@pytest.mark.slow
def test_tools_that_cannot_start_in_a_child_are_named_and_it_goes_on(site: Site, out: Path) -> None:
    site.write("gone.py", "from toytools import Counter\nclass Gone(Counter):\n    pass\n")
    site.write(
        f"{out.name}.py", "from launching import *\nos.remove('gone.py')\nprint(launch(0))\n"
    )
    done = site.amanda("run", "-t", "gone.py:Gone", "-o", str(out), f"{out.name}.py")
    assert done.stdout == "[0]\n"
    assert "runs without tools: " in done.stderr
    assert "gone.py" in done.stderr


@pytest.mark.slow
def test_amanda_run_in_a_child_has_the_tools_that_it_names(site: Site, out: Path) -> None:
    inner = out.parent / f"{out.name}_inner"
    command = f"[sys.executable, '-m', 'amanda', 'run', '-t', 'i=count', '-o', {str(inner)!r}"
    run(site, out, f"subprocess.run({command}, 'rank.py'], env={{**os.environ, 'RANK': '1'}})\n")
    assert json.loads((inner / "rank1/i.json").read_text())["calls"] == {"encoder/relu": 11}
    assert found(out) == {".": 0}


@pytest.mark.slow
def test_a_rank_that_becomes_one_while_it_runs(site: Site, out: Path) -> None:
    """As a program that starts itself again for other ranks, and sets variables for its own."""
    program = (
        "if 'LOCAL_RANK' not in os.environ:\n"
        "    os.environ.update(LOCAL_RANK='0', WORLD_SIZE='2', NODE_RANK='0')\n"
        "    environment = {**os.environ, 'LOCAL_RANK': '1'}\n"
        "    other = subprocess.Popen([sys.executable, *sys.argv], env=environment)\n"
        "    model(7)\n"
        "    print(other.wait())\n"
        "else:\n"
        "    model(8)\n"
    )
    assert run(site, out, program) == "0\n"
    assert found(out) == {"rank0": 7, "rank1": 8}
