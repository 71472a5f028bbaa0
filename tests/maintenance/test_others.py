"""Running others' tests: a failure under a tool is found, however the test ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import gc, multiprocessing, os, pathlib, sys, time
import pytest
import amanda

@pytest.fixture
def applied(request):
    return request.config.getoption("--applied")

@pytest.fixture
def again(applied):
    seen = pathlib.Path(__file__).with_suffix("." + applied)
    yield seen.exists()
    seen.touch()

def test_passes(): pass
def test_fails_plain(): assert False
@pytest.mark.skip
def test_is_skipped(): pass
@pytest.mark.xfail(strict=True)
def test_is_expected_to_fail(): assert False
def test_fails_under_watch(applied): assert applied != "watch"
def test_crashes_under_watch(applied):
    if applied == "watch": os.abort()
def test_hangs_under_none(applied):
    if applied == "none": time.sleep(600)
def test_fails_once(applied, again): assert applied != "watch" or again
@pytest.fixture
def broken(applied):
    yield
    assert applied in ("plain", "eager")
def test_fails_in_teardown(broken): pass
def test_fails_eagerly_too(applied): assert applied == "plain"
def child(): sys.exit(any(isinstance(each, amanda.Handle) for each in gc.get_objects()))
def test_fails_under_a_tool_in_a_process():
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
def test_is_the_last(): pass
"""
SHIPPED = """
import gc
from amanda_tools import dump, trace

def test_passes(): pass
def test_fails_under_dump():
    assert not any(isinstance(each, dump.Dump) for each in gc.get_objects())
def test_spoils_a_result(): trace.TraceResult.to_json = lambda result: "{\\"calls\\": NaN}"
"""
CODE = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from maintenance.sweeps.others import comparing
from maintenance.sweeps.others.running import Limits, TestFile
comparing.ALONE = {"shipped": ["dump", "trace"]}
file = TestFile("test_it.py", Path(sys.argv[1]), compiles=sys.argv[2] != "shipped")
tools = tuple(sys.argv[2].split(","))
print(json.dumps(asdict(comparing.compare("suite", file, tools, Limits(test=5)))))
"""


def results_of(folder: Path, tests: str, tools: str) -> Any:
    """Return the result of the tests under tools."""
    (folder / "test_it.py").write_text(tests)
    command = [sys.executable, "-c", CODE, str(folder), tools]
    # The package lies in the root, which `-P` would hide.
    done = subprocess.run(command, cwd=ROOT, env={"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_what_fails_under_a_tool_is_found(tmp_path: Path) -> None:
    found = results_of(tmp_path, TESTS, "watch,none")
    assert found["plain"] == {"passed": 9, "failed": 1, "skipped": 1, "expected": 1}

    watch, none = found["tools"]["watch"], found["tools"]["none"]
    assert {failure["test"]: failure["outcome"] for failure in watch["failures"]} == {
        "test_it.py::test_fails_under_watch": "failed",
        "test_it.py::test_crashes_under_watch": "crashed",
        "test_it.py::test_fails_in_teardown": "failed",
        "test_it.py::test_fails_eagerly_too": "failed",
        "test_it.py::test_fails_under_a_tool_in_a_process": "failed",
    }
    assert {failure["test"]: failure["outcome"] for failure in none["failures"]} == {
        "test_it.py::test_hangs_under_none": "hung",
        "test_it.py::test_fails_in_teardown": "failed",
        "test_it.py::test_fails_eagerly_too": "failed",
        "test_it.py::test_fails_under_a_tool_in_a_process": "failed",
    }
    for compared in (watch, none):
        eager = [failure["test"] for failure in compared["failures"] if failure["eager"]]
        assert eager == ["test_it.py::test_fails_eagerly_too"]
    assert watch["unstable"] == ["test_it.py::test_fails_once"]
    assert none["unstable"] == []
    assert (watch["passed"], none["passed"]) == (3, 5)
    assert watch["failures"][0]["error"].startswith("AssertionError")


@pytest.mark.slow
def test_the_shipped_tool_that_fails_is_named(tmp_path: Path) -> None:
    found = results_of(tmp_path, SHIPPED, "shipped")
    assert found["plain"] == {"passed": 3}
    shipped = found["tools"]["shipped"]
    assert {failure["test"]: failure["alone"] for failure in shipped["failures"]} == {
        "test_it.py::test_fails_under_dump": ["dump"],
        "test_it.py::test_spoils_a_result": ["trace"],
    }
    assert shipped["failures"][1]["error"].startswith("ValueError: NaN is not JSON")
