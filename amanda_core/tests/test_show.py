"""`amanda show`: the results file of any tool as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from amanda_core.cli import app
from amanda_core.cli.drawing import narrowed
from amanda_core.results import Table

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
        "type          calls  shapes",
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


MEASURED = {
    "format": "toy/1",
    "units": {"time": "ns", "bytes": "B", "sizes.*": "B", "took": "s"},
    "took": 0.0125,
    "sizes": {"weights": 1_500_000},
    "ops": [
        {"id": 1, "name": "a/relu", "time": 900, "bytes": 999, "device": 0},
        {"id": 2, "name": "b/conv2d", "time": 2_500_000, "bytes": 80_000},
        {"id": 3, "name": "b/add", "time": 3_000, "bytes": 0, "note": "short"},
    ],
    "by_module": {
        "": {"time": 3},
        "a": {"time": 1},
        "a.b.c": {"time": 2},
        "a/b": {"time": 4},
    },
}


def test_json_is_bounded_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ops = [{"name": str(number), "shape": [1, 2, 3]} for number in range(5)]
    content = {"format": "x/1", "ops": ops, "calls": {str(n): n for n in range(50)}}
    file = write(tmp_path / "x.json", content)
    assert app.parse(["show", file, "--json", "--limit", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [op["name"] for op in found["ops"]] == ["0", "1"]
    assert len(found["calls"]) == 24
    assert found["left_out"] == {"ops": 3, "calls": 26, "ops.0.shape": 1, "ops.1.shape": 1}
    assert app.parse(["show", file, "--json", "--limit", "50"]) == 0
    assert json.loads(capsys.readouterr().out) == content


def test_units_are_human_and_rows_that_matter_come_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "r.json", MEASURED)
    assert app.parse(["show", file, "--by", "op", "--sort", "time", "--top", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[3:] == [
        "name        time  bytes  note   id",
        "b/conv2d  2.5 ms  80 kB          2",
        "b/add       3 µs    0 B  short   3",
        "1 more; --all shows them",
    ]
    assert app.parse(["show", file]) == 0
    out = capsys.readouterr().out
    assert "took   12.5 ms" in out
    assert "weights  1.5 MB" in out
    assert "units" not in out
    assert "device" not in out  # Nothing is in this column, for people. Programs get it.
    assert app.parse(["show", file, "--by", "module", "--depth", "2", "--sort", "time"]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()[4:]]
    assert rows == ["a/b", "(all)", "a"]


def test_plain_numbers_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "r.json", MEASURED)
    assert app.parse(["show", file, "--by", "op", "--sort", "name", "--csv"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "name,id,time,bytes,device,note",
        "a/relu,1,900,999,0,",
        "b/add,3,3000,0,,short",
        "b/conv2d,2,2500000,80000,,",
    ]
    for wrong, message in (
        (["--csv"], "--csv writes one part"),
        (["--sort", "size"], "No column is 'size'; there are field, value"),
        (["--by", "op", "--part", "ops"], "exclude one another"),
        (["--by", "type"], "has no part 'by_type'"),
    ):
        assert app.parse(["show", file, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_columns_go_before_names_are_wrapped() -> None:
    name = "encoder.layers.11.attention.self.query/linear"
    columns = ("op", "calls", "source", "time", "note")
    table = Table("", columns, [(name, 3, "x.py:" + "9" * 40, 1.5, "x")])
    whole, hidden = narrowed(table, 200)
    assert (whole.columns, hidden) == (list(columns), [])
    some, hidden = narrowed(table, 75)
    assert (list(some.columns), hidden) == (["op", "calls", "time"], ["source", "note"])
    few, hidden = narrowed(table, 60)
    assert (list(few.columns), hidden) == (["op", "calls"], ["source", "time", "note"])
    assert few.rows == [[name, 3]]
    # A share is a number to those who read it: what is text goes first.
    shares = Table("", ("op", "share", "source"), [("relu", "7.1%", "net.py:1"), ("add", "", "b")])
    assert narrowed(shares, 20) == (
        Table("", ["op", "share"], [["relu", "7.1%"], ["add", ""]]),
        ["source"],
    )
    one, _ = narrowed(table, 20)
    assert one.rows == [[name]]


def test_sentences_are_wrapped_and_names_are_not() -> None:
    columns = ("tool", "status", "what it does", "distribution")
    table = Table("", columns, [("a_tool", "ok", "Counts the ops. " * 9, "amanda-tools 0.1.0")])
    prose = ("what it does",)
    assert narrowed(table, 140, prose)[1] == []
    some, hidden = narrowed(table, 60, prose)
    assert (list(some.columns), hidden) == (["tool", "status", "what it does"], ["distribution"])
    assert narrowed(table, 40, prose)[1] == ["status", "distribution"]
    # Only what is declared may go, in this order.
    assert narrowed(table, 60, prose, ("distribution", "status"))[1] == ["distribution"]
    # They go so that the only sentences can be read.
    assert narrowed(table, 70, prose)[1] == []
    assert narrowed(table, 70, prose, ("distribution", "status"))[1] == ["distribution"]
    assert narrowed(table, 60, prose, ("what it does", "status"))[1] == ["what it does"]
    assert narrowed(table, 20, prose, ("status",))[1] == ["status"]


def test_rows_without_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "r.json", {"format": "toy/1", "ops": [{}, {}], "by_module": {"a": {}}})
    assert app.parse(["show", file]) == 0
    assert "by_module" in capsys.readouterr().out


def test_long_names_are_shortened_and_csv_escapes_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a" * 3000 + "b" * 3000
    ops = [{"name": name, "n": -1}, {"name": "=HYPERLINK(1)", "n": 2}, {"name": "\x1b[31m\ud800"}]
    file = write(tmp_path / "r.json", {"format": "toy/1", "ops": ops})
    assert app.parse(["show", file]) == 0
    out = capsys.readouterr().out
    assert "a [...] b" in out
    assert max(map(len, out.splitlines())) < 600
    assert app.parse(["show", file, "--part", "ops", "--csv"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "name,n",
        f"{name},-1",
        "'=HYPERLINK(1),2",
        "\\x1b[31m\\ud800,",
    ]


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
