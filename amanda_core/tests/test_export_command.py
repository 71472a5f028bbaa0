"""`amanda export`: the order of its steps and its errors, with a driver that reads files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from amanda_core import hookimpl
from amanda_core.cli import app
from amanda_core.driver_kit import ModelFile
from amanda_core.plugins import discovery
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy.driver import ToyDriver

TOOLS = """
import amanda
from amanda_core.testing.toy import framework as toy


class Adding(amanda.Tool):
    def __init__(self, number: float = 1.0):
        super().__init__()
        add = lambda y: toy.Value(y.data + number)
        self.add_inst_for_op(lambda op: op.insert_after_op(add))


class Replacing(amanda.Tool):
    def __init__(self):
        super().__init__()
        self.add_inst_for_op(lambda op: op.replace_op(lambda x: toy.Value(7.0)))


class Looking(amanda.Tool):
    def __init__(self):
        super().__init__()
        self.add_inst_for_op(lambda op: op.insert_after_op(lambda y: None))
"""


class ToyFile(ModelFile):
    """A model that adds a number to the ReLU of its input; the file has the number."""

    log: list[Any]

    def __init__(self, path: str) -> None:
        self.log = []
        self.model = self
        self.number = float(json.loads(Path(path).read_text())["number"])

    def __call__(self, x: float) -> float:
        return toy.relu(toy.Value(x)).data + self.number

    def example_inputs(self) -> float:
        return 1.0

    def read_inputs(self, path: str) -> float:
        return float(Path(path).read_text())

    def run(self, inputs: float) -> float:
        found = self(inputs)
        self.log.append((inputs, found))
        return found

    def write(self, program: Any, path: str, runs: Sequence[Any], outputs: Sequence[Any]) -> str:
        Path(path).write_text(json.dumps([program, list(runs), list(outputs), self.log]))
        return "checked"


class Reading(ToyDriver):
    """A driver that exports models of a number."""

    @hookimpl
    def amanda_model_file(self, path: str) -> ModelFile | None:
        return ToyFile(path) if path.endswith(".toy") else None

    @hookimpl
    def amanda_exported(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return [model(*args[:1]), *map(model, args[1:])] if isinstance(model, ToyFile) else None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which has a model, tools and inputs."""
    discovery.register(Reading(), "toy")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.toy").write_text('{"number": 10}')
    (tmp_path / "tools.py").write_text(TOOLS)
    for number in (2, 3):
        (tmp_path / f"{number}.txt").write_text(str(number))
    return tmp_path


def call(*arguments: str) -> int:
    outcome = app.parse(["export", *arguments])
    assert isinstance(outcome, int)
    return outcome


def test_a_model_is_exported_as_it_runs_under_the_tools(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("net.toy", "-t", "tools.py:Adding:number=5", "-o", "new.toy") == 0
    program, runs, outputs, log = json.loads(Path("new.toy").read_text())
    assert program == [16.0]
    assert runs == [1.0]
    assert outputs == [16.0]
    assert log == [[1.0, 11.0], [1.0, 16.0]]  # Plainly, and to be compared with.
    assert capsys.readouterr().out == "new.toy: net.toy with Adding; checked\n"


def test_inputs_of_several_runs(folder: Path) -> None:
    arguments = ["--inputs", "2.txt", "--inputs", "3.txt", "-o", "new.toy"]
    assert call("net.toy", "-t", "tools.py:Replacing", *arguments) == 0
    program, runs, outputs, log = json.loads(Path("new.toy").read_text())
    assert program == outputs == [17.0, 17.0]
    assert runs == [2.0, 3.0]
    # Each plainly, to calibrate, and to be compared with.
    assert [found for _, found in log] == [12.0, 13.0, 17.0, 17.0, 17.0, 17.0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["none.toy", "-t", "tools.py:Adding", "-o", "new.toy"],
            "The file 'none.toy' does not exist",
        ),
        (["tools.py", "-t", "tools.py:Adding", "-o", "new.toy"], "that read files: toy"),
        (["net.toy", "-t", "tools.py:Adding", "-o", "2.txt"], "'2.txt' is there already"),
        (["net.toy", "-t", "tools.py:Adding", "-o", "net.toy"], "is the model itself"),
        (["net.toy", "-t", "tools.py:Adding", "-o", "."], "is a folder"),
        (["net.toy", "-t", "tools.py:Adding", "-o", "a/b.toy"], "The folder 'a' does not exist"),
        (["net.toy", "-t", "tools.py:Looking", "-o", "new.toy"], "Looking changes nothing"),
        (["net.toy", "-t", "tools.py:Adding:x=1", "-o", "new.toy"], "x"),
        (["net.toy", "-t", "tools.py:None_", "-o", "new.toy"], "None_"),
        (["net.toy", "-o", "new.toy"], "Missing option '-t'"),
        (["net.toy", "-t", "tools.py:Adding"], "Missing option '-o'"),
    ],
)
def test_errors(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert call(*arguments) == 2
    assert said in capsys.readouterr().err
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert after == before


def test_a_file_is_replaced_on_request(folder: Path) -> None:
    assert call("net.toy", "-t", "tools.py:Adding", "-o", "2.txt", "--force") == 0
    assert json.loads(Path("2.txt").read_text())[0] == [12.0]


def test_without_a_driver_that_reads_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    discovery.register(ToyDriver(), "toy")
    (tmp_path / "net.toy").write_text("{}")
    assert call(str(tmp_path / "net.toy"), "-t", "x", "-o", str(tmp_path / "new")) == 2
    assert "none is installed" in capsys.readouterr().err
