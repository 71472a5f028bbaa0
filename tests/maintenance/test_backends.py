"""The pages of backends can be made of the sources and results that there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from maintenance.backends import one_tool, pages, tool_matrix

from amanda_core.cli.tools import describe


def test_each_driver_and_each_result_has_a_row() -> None:
    rows = pages.driver_table().splitlines()[2:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == list(pages.DRIVERS)
    for driver in pages.PARTS:
        assert len(pages.part_table(driver).splitlines()) > 10
    shown = pages.tool_table()
    for framework in ("PyTorch", "TensorFlow", "JAX", "MXNet", "MindSpore", "ONNX Runtime"):
        assert f"\n| {framework}" in shown


def test_the_tools_of_the_page_work_by_hand_here_and_in_the_results() -> None:
    here = {"PyTorch": one_tool.outcomes(one_tool.BACKENDS["torch"]()["PyTorch"])}
    assert set(here["PyTorch"]) == set(pages.TOOLS)
    assert one_tool.problems(here) == []
    assert one_tool.problems({"PyTorch": {"prune": "4 masks"}}) == ["PyTorch, prune: 4 masks"]
    for path in pages.RESULTS.glob("*.json"):
        if not path.name.endswith(".kit.json"):
            assert one_tool.problems(json.loads(path.read_text("utf-8"))) == []


def test_the_matrix_has_every_tool_in_every_mode_and_is_current() -> None:
    own = {one["name"] for one in describe() if one["distribution"] == "amanda-tools"}
    assert own == set(tool_matrix.CASES)
    text = tool_matrix.PAGE.read_text("utf-8")
    assert text == tool_matrix.page(), "python -m maintenance.backends.tool_matrix NAME"
    head, *rows = [line for line in text.splitlines() if line.startswith("| ")][: len(own) + 1]
    assert head.count("|") == len(tool_matrix.MODES) + 2
    assert len(rows) == len(own)
    for row in rows:
        assert set(row.strip("| ").split(" | ")[1:]) <= set(tool_matrix.WORDS), row


def test_the_matrix_agrees_with_what_tools_say() -> None:
    for tool in describe():
        if tool["name"] not in tool_matrix.CASES:
            continue
        (row,) = [
            line.strip("| ").split(" | ")[1:]
            for line in tool_matrix.PAGE.read_text("utf-8").splitlines()
            if line.startswith(f"| [`{tool['name']}`]")
        ]
        works = {
            {"PyTorch": "pytorch", "TensorFlow": "tensorflow"}.get(mode.partition(",")[0], mode)
            for mode, word in zip(tool_matrix.MODES, row, strict=True)
            if word != "no"
        }
        if tool["works_on"]:
            assert works == {pattern.partition("/")[0] for pattern in tool["works_on"]}
        else:  # Every framework, if not every mode.
            assert {mode.partition(",")[0] for mode in works} == {
                *("pytorch", "tensorflow", "JAX", "MXNet", "MindSpore", "ONNX Runtime")
            }


@pytest.mark.slow
def test_every_cell_of_this_environment_is_as_the_page_has_it(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\n"
        "from maintenance.backends import tool_matrix\n"
        "tool_matrix.RESULTS = pathlib.Path(sys.argv[1])\n"
        "assert tool_matrix.record('shared') == []\n"
    )
    root = str(Path(tool_matrix.__file__).parents[2])
    for name, more in (
        ("shared", {}),
        ("in_python", {"AMANDA_TORCH_INTERCEPTOR": "function_mode"}),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)],
            env={**os.environ, **more, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        written = (tool_matrix.RESULTS / f"{name}.json").read_text("utf-8")
        assert (tmp_path / "shared.json").read_text("utf-8") == written


def test_a_tool_that_does_nothing_or_leaves_something_is_wrong() -> None:
    case = tool_matrix.CASES["steer"]
    calls = []

    def plain(x):  # type: ignore[no-untyped-def]
        return x

    def other_each_time(x):  # type: ignore[no-untyped-def]
        calls.append(x)
        return x + len(calls)

    assert tool_matrix.cell(case, plain, "PyTorch, eager") == ("wrong: nothing changed", "")
    word, _ = tool_matrix.cell(case, other_each_time, "PyTorch, eager")
    assert word == "wrong: something stays after the tool"
