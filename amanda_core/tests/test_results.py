"""The folder of results: nothing is written outside, nothing replaced silently; reading JSON."""

from __future__ import annotations

import contextlib
import json
import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from amanda_core.errors import OutputError, ResultError
from amanda_core.results import HasResult, Result, Table, printable, tables as results
from amanda_core.results.output import Output


class Found:
    """A result that writes what it is given."""

    def __init__(self, text: str = "{}", *files: str, told: Sequence[str] | None = None) -> None:
        self.text, self.files = text, files
        self.told = files if told is None else told

    def table(self) -> Table:
        return Table("", (), [])

    def to_json(self) -> str:
        return self.text

    def write(self, folder: Path) -> list[Path]:
        for name in self.files:
            (folder / name).write_text("x")
        return [folder / name for name in self.told]


def test_results_are_files_in_the_folder(tmp_path: Path) -> None:
    out = Output(tmp_path / "a/b", ["one"])
    assert not (tmp_path / "a").exists()  # Not before there is something to write.
    files = out.write("one", Found('{"x": 1}', "t.txt"))
    assert files == [tmp_path / "a/b/one.json", tmp_path / "a/b/one/t.txt"]
    assert json.loads(files[0].read_text()) == {"x": 1}
    out.write("two", Found())
    assert not (tmp_path / "a/b/two").exists()
    assert sorted(p.name for p in (tmp_path / "a/b").iterdir()) == ["one", "one.json", "two.json"]


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/x", "a\0b", "one/../two"])
def test_a_name_is_a_file_in_the_folder(tmp_path: Path, name: str) -> None:
    out = Output(tmp_path / "out", [])
    with pytest.raises(OutputError, match=r"is not a file name. Give the tool another name"):
        out.write(name, Found())
    if name:
        with pytest.raises(OutputError, match="is not a file name"):
            Output(tmp_path / "out", [], part=name)
    assert not list(tmp_path.iterdir())


def test_results_that_are_there_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text("precious")
    (tmp_path / "two").mkdir()
    with pytest.raises(OutputError, match=r"results already: one\.json, two\. Name another folder"):
        Output(tmp_path, ["one", "two", "three"])
    Output(tmp_path, ["three"]).write("three", Found())
    Output(tmp_path, ["one"], force=True).write("one", Found())
    assert (tmp_path / "one.json").read_text() == "{}"


def test_what_is_no_folder_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(OutputError, match=r"is not a folder. Name another one"):
            Output(folder, [])


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    out = tmp_path / "out"
    out.mkdir()
    (out / "one.json").symlink_to(outside / "precious")
    (out / "two").symlink_to(outside)
    (out / "rank0").symlink_to(outside)
    made = Output(out, ["one", "two"], force=True)
    with pytest.raises(OutputError, match="is a link, and is not followed"):
        made.write("one", Found())
    with pytest.raises(OutputError, match="is a link, and is not followed"):
        made.write("two", Found("{}", "t.txt"))
    with pytest.raises(OutputError, match="is a link, and is not followed"):
        Output(out, ["one"], part="rank0")
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_text() == "precious"
    # The folder itself may be a link, because the user named it.
    (tmp_path / "link").symlink_to(outside)
    assert Output(tmp_path / "link", ["x"]).write("x", Found()) == [outside / "x.json"]


def test_forced_runs_leave_nothing_of_earlier_ones(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    out = tmp_path / "out"
    for part in ("", "rank0", "rank1", "rank2", "rank0-restart1"):
        (out / part / "one").mkdir(parents=True)
        (out / part / "one/old.txt").write_text("old")
        (out / part / "one/new.txt").symlink_to(precious)
        (out / part / "one.json").write_text("old")
        (out / part / ".one.77").mkdir()
    (out / "rank2/other.json").write_text("of another tool")
    made = Output(out, ["one"], part="rank0", force=True)
    made.clear(processes=2)
    made.write("one", Found("{}", "new.txt"))
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == [
        *("rank0/one.json", "rank0/one/new.txt", "rank1/one.json", "rank1/one/new.txt"),
        *("rank1/one/old.txt", "rank2/other.json"),
    ]
    assert precious.read_text() == "precious"


def test_files_beside_a_result_appear_when_all_are_there(tmp_path: Path) -> None:
    class Failing(Found):
        def write(self, folder: Path) -> list[Path]:
            super().write(folder)
            assert not (tmp_path / "one").exists()
            raise OSError("disk full")

    out = Output(tmp_path, ["one"])
    with pytest.raises(OSError, match="disk full"):
        out.write("one", Failing("{}", "t.txt"))
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]


def test_one_run_at_a_time_has_a_folder(tmp_path: Path) -> None:
    first, second = (Output(tmp_path / "a/out", ["one"]) for _ in range(2))
    assert first.reserve()
    assert not second.reserve()
    first.release()
    assert not (tmp_path / "a").exists()
    assert second.reserve()
    second.write("one", Found())
    second.release()
    assert not first.reserve()  # There are results meanwhile.
    assert [path.name for path in (tmp_path / "a/out").iterdir()] == ["one.json"]


def test_a_tool_that_writes_elsewhere_is_named(tmp_path: Path) -> None:
    out = Output(tmp_path / "out", [])
    with pytest.raises(OutputError, match=r"'one' wrote .*escaped.*outside of its folder"):
        out.write("one", Found("{}", "../../escaped"))
    with pytest.raises(OutputError, match="which is not a file"):
        out.write("two", Found("{}", told=["absent"]))


@pytest.mark.parametrize("text", ["", "{", "NaN", '{"a": Infinity}', "[" * 100_000])
def test_what_is_no_json_is_not_written(tmp_path: Path, text: str) -> None:
    with pytest.raises(ResultError, match=r"The result of 'one' is not JSON.*Correct its to_json"):
        Output(tmp_path / "out", []).write("one", Found(text))
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    out = Output(tmp_path, [])
    blocking = tmp_path / f".one.json.{os.getpid()}"
    blocking.mkdir()
    with pytest.raises(OutputError, match=r"one\.json' cannot be written: "):
        out.write("one", Found())
    assert not (tmp_path / "one.json").exists()


def test_files_of_results_are_read_as_json_within_limits(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{"a": [1.5, null]}')
    assert results.load(path) == {"a": [1.5, None]}
    with pytest.raises(ResultError, match="Larger than 5 bytes"):
        results.load(path, limit=5)
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ResultError, match=r"Not valid JSON.*Write it again"):
        results.load(path)
    path.write_text("[" * 100_000)
    with pytest.raises(ResultError, match="Not valid JSON"):
        results.load(path)
    path.write_text("1" * 5000)
    with pytest.raises(ResultError, match="Not valid JSON"):
        results.load(path)
    with pytest.raises(ResultError, match="Not a file"):
        results.load(tmp_path)
    with pytest.raises(ResultError, match="Cannot be read"):
        results.load(tmp_path / "absent")
    with pytest.raises(ResultError, match="Cannot be read"):
        results.load(Path("a\0b"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ResultError, match="Not a file"):
        results.load(tmp_path / "pipe")


@given(content=st.one_of(st.binary(max_size=100), st.text(max_size=50).map(str.encode)))
def test_any_file_is_json_or_an_error_of_ours(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with contextlib.suppress(ResultError):
        json.dumps(results.load(path), allow_nan=False)


@given(st.text(max_size=50))
def test_nothing_printed_controls_a_terminal(text: str) -> None:
    shown = printable(text)
    assert not [letter for letter in shown if ord(letter) < 32 or 127 <= ord(letter) < 160]
    assert "\u202e" not in shown
    table = str(Table(text, (text,), [(text,)]))
    assert all(
        letter.isprintable() or letter == "\n" or unicodedata.category(letter) == "Zs"
        for letter in table
    )


def test_tables_have_a_value_for_each_column() -> None:
    with pytest.raises(ResultError, match="row of the table 't' has 1 values for 2 columns"):
        Table("t", ("a", "b"), [(1,)])


def test_the_protocols_are_what_tools_have() -> None:
    assert isinstance(Found(), Result)
    assert not isinstance(Found(), HasResult)
