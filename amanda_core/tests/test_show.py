"""`amanda show`: the results file of any tool as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from amanda_core.cli import app

RESULT = {
    "format": "toy.counts/1",
    "calls": 3,
    "ops": [
        {"type": "conv2d", "calls": 2, "shapes": [[1, 3], [1, 8]]},
        {"type": "relu\x1b[31m", "calls": 1, "note": None},
    ],
    "by_type": {"conv2d": {"calls": 2}, "relu": {"calls": 1}},
    "include": ["matmul"],
    "empty": [],
}


def write(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_each_part_is_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.parse(["show", write(tmp_path / "counts.json", RESULT)]) == 0
    assert capsys.readouterr().out.split("\n") == [
        "counts.json: toy.counts/1",
        "",
        "field  value",
        "calls      3",
        "",
        "ops",
        "type          calls  shapes            note",
        "conv2d            2  [[1, 3], [1, 8]]",
        "relu\\x1b[31m      1",
        "",
        "by_type",
        "name    calls",
        "conv2d      2",
        "relu        1",
        "",
        "include",
        "value",
        "matmul",
        "",
    ]


def test_a_part_and_all_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "many.json", {"format": "toy/1", "ops": list(range(21)), "n": 1})
    assert app.parse(["show", file, "--part", "ops"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("   19\n1 more; --all shows them\n")
    assert "field" not in out
    assert app.parse(["show", file, "--all"]) == 0
    assert capsys.readouterr().out.endswith("   20\n")
    assert app.parse(["show", file, "--part", "ops", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == list(range(21))
    assert app.parse(["show", file, "--part", "op"]) == 2
    assert "it has format, ops, n" in capsys.readouterr().err


def test_a_folder_of_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.parse(["show", str(tmp_path)]) == 2
    assert "There are no results in" in capsys.readouterr().err
    write(tmp_path / "trace.json", [1])
    for name in ("a", "b"):
        write(tmp_path / f"{name}.json", {"format": f"{name}/1", "n": 1})
    assert app.parse(["show", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "a.json: a/1" in out
    assert "b.json: b/1" in out
    assert "trace" not in out
    assert app.parse(["show", str(tmp_path), "--json"]) == 0
    assert [found["format"] for found in json.loads(capsys.readouterr().out)] == ["a/1", "b/1"]


@pytest.mark.parametrize(
    ("text", "told"), [("[1]", "is not the result of a tool"), ("{", "Not valid JSON")]
)
def test_what_is_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    assert app.parse(["show", str(file)]) == 2
    assert told in capsys.readouterr().err
