"""Trying a tool without a framework: the toy program, and checks of results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import amanda
from amanda_core import OpContext
from amanda_core.errors import OutputError, ResultError
from amanda_core.plugins import discovery
from amanda_core.results import Table
from amanda_core.testing import OPERATORS, check_result, run_toy_program
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy.driver import REPLACED, registered


class Watching(amanda.Tool):
    """Notes which operators run, and the gradients of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []
        self.gradients: dict[str, list[Any]] = {}
        self.steps: list[int] = []
        self.add_inst_for_step(None, self.steps.append)
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        name = context.name
        context.insert_before_op(lambda *values: self.ran.append(name), observe=True)

        def note(*gradients: Any) -> None:
            self.gradients[name] = list(gradients)

        context.insert_after_backward_op(note)


def test_the_numbers_are_those_computed_by_hand() -> None:
    # hidden = relu(2 * 3 + 1) = 7; pair = 8, 14; total = 22; output = 22 * 0.5 = 11; loss = 121.
    # d loss / d output = 22; scale: 22 * 22; total: 22 * 0.5 = 11; hidden: 11 * 1 + 11 * 2 = 33.
    run = run_toy_program()
    assert run.losses == [121.0]
    assert run.gradients == {"weight": 33.0 * 2, "bias": 33.0, "scale": 22.0 * 22}
    assert run.parameters == {
        "weight": 3 - 66 * 0.125,
        "bias": 1 - 33 * 0.125,
        "scale": 0.5 - 484 * 0.125,
    }


def test_a_tool_sees_each_operator_gradient_and_step() -> None:
    tool = Watching()
    run = run_toy_program(tool, steps=2, rate=0.0)
    assert tool.ran == [*OPERATORS, *OPERATORS]
    assert tool.steps == [0, 1]
    assert tool.gradients["output/linear"] == [11.0, 484.0, None]
    assert tool.gradients["total"] == [[11.0, 11.0]]
    assert tool.gradients["pair"] == [33.0]
    assert run == run_toy_program(steps=2, rate=0.0)
    assert run.losses == [121.0, 121.0]


def test_what_a_tool_changes_is_seen() -> None:
    tool = amanda.Tool()

    def analyse(context: OpContext) -> None:
        if context["type"] == "relu":
            context.insert_after_op(lambda y: toy.Value(float(y) + 1))

    tool.add_inst_for_op(analyse)
    # hidden = 8; pair = 9, 16; total = 25; output = 12.5.
    assert run_toy_program(tool).losses == [12.5**2]


def test_nothing_is_left_behind() -> None:
    found = {name: getattr(toy, name) for name in REPLACED}
    run_toy_program(Watching())
    assert {name: getattr(toy, name) for name in REPLACED} == found
    assert discovery.drivers() == ()
    with registered() as driver, registered() as again:
        assert driver is again
        assert [found.info.name for found in discovery.drivers()] == ["toy"]


def test_it_needs_no_framework_nor_numpy() -> None:
    program = (
        "import sys\nfrom amanda_core.testing import run_toy_program\nimport amanda\n"
        "run_toy_program(amanda.Tool())\n"
        "print(*sorted({'torch', 'tensorflow', 'jax', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


class Found:
    """A result of which a test changes a part."""

    def __init__(self, json: Any = '{"format": "found/1"}', table: Any = None) -> None:
        self.json, self.shown = json, Table("", ("a",), [(1,)]) if table is None else table

    def table(self) -> Table:
        shown: Table = self.shown
        return shown

    def to_json(self) -> str:
        text: str = self.json
        return text


class Escaping(Found):
    def write(self, folder: Path) -> list[Path]:
        path = folder.parent.parent / "escaped.txt"
        path.write_text("x")
        return [path]


def test_a_result_that_can_be_written_and_shown() -> None:
    assert check_result(Found(json.dumps({"format": "found/1", "n": 1}))) == {
        "format": "found/1",
        "n": 1,
    }


@pytest.mark.parametrize(
    ("result", "error", "told"),
    [
        ({}, AssertionError, r"dict needs the methods table\(\) and to_json\(\)"),
        (Found(table="a"), AssertionError, "must return a Table, not 'a'"),
        (Found("[1]"), AssertionError, "must be an object"),
        (Found('{"n": 1}'), AssertionError, "must have a 'format', such as"),
        (Found('{"format": "x/1", "n": NaN}'), ResultError, "NaN is not a JSON number"),
        (Found("{"), ResultError, "is not JSON"),
        (Escaping(), OutputError, "outside of its folder"),
    ],
)
def test_a_result_that_cannot_is_told_what_it_lacks(
    result: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        check_result(result)
