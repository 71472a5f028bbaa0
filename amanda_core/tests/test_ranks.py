"""Results of several processes as one: what is added, what is compared, and what is missing."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from amanda_core.cli import app
from amanda_core.processes.index import packed
from amanda_core.processes.merging import merge
from amanda_core.results.output import index_of
from amanda_core.results.run_state import STATE, RunState

RANKS = 5


def content(rank: int, ops: int = 4) -> dict[str, Any]:
    """Return a result as a tool writes it, with figures of all kinds."""
    return {
        "format": "profile/1",
        "units": {"self": "ns", "bytes": "B", "peak": "B", "total.time": "s", "share": "%"},
        "peak": 100 + rank % 3,
        "note": "all",
        "limit": 10,
        "total": {"calls": 3 * rank, "share": rank / 10},
        "ops": [
            {
                "namespace": "toy",
                "id": 7000 + op,
                "name": f"op{op}",
                "source": f"a.py:{op}",
                "calls": rank + op,
                "self": 1000 * op + (rank * 7 + op) % RANKS,
                "bytes": 2**op,
                "peak": rank * op,
                "shortest": 50 - rank,
                "share": rank / 10,
                "device": rank if op else None,
                "shape": f"[{rank},{op}]",
            }
            for op in range(ops)
        ],
        "by_module": {"": {"calls": rank}, "layer": {"calls": 1}},
        "order": [1, 2, rank],
        "kept": [1, 2],
        "notes": ["of all", *(["of one"] if rank == 3 else [])],
        "charts": [{"kind": "bars", "part": "ops"}, {"kind": "figures", "items": []}],
    }


def written(folder: Path, contents: dict[int, dict[str, Any]], processes: int = RANKS) -> Path:
    for rank, one in contents.items():
        part = folder / f"rank{rank}"
        part.mkdir(parents=True)
        (part / "profile.json").write_text(json.dumps(one))
        state = RunState("train.py", 100 + rank, "r", rank, processes, ended=True)
        (part / STATE).write_text(state.to_json())
    return folder


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert app.parse(["show", *arguments]) == 0
    return capsys.readouterr().out


def test_figures_of_each_kind() -> None:
    every = {f"rank{rank}": content(rank) for rank in range(RANKS)}
    found = merge(list(every), every.__getitem__)
    ranks = range(RANKS)
    for op, row in enumerate(found["ops"]):
        times = [1000 * op + (rank * 7 + op) % RANKS for rank in ranks]
        assert row == {
            "namespace": "toy",
            "id": 7000 + op,
            "name": f"op{op}",
            "source": f"a.py:{op}",
            "calls": sum(rank + op for rank in ranks),
            "self": max(times),
            "bytes": RANKS * 2**op,
            "peak": (RANKS - 1) * op,
            "shortest": 50 - (RANKS - 1),
            "share": "0 to 0.4",
            "device": sum(ranks) if op else None,
            "shape": "(differs)",
            "slowest": f"rank{times.index(max(times))}",
            "skew": round(max(times) / statistics.mean(times), 3),
        }
    assert found["by_module"] == {"": {"calls": sum(ranks)}, "layer": {"calls": RANKS}}
    assert found["total"] == {"calls": 3 * sum(ranks), "share": "0 to 0.4"}
    assert (found["peak"], found["note"], found["limit"]) == (102, "all", 10)
    assert [(row["name"], row["peak"], row["total calls"]) for row in found["ranks"]] == [
        (f"rank{rank}", 100 + rank % 3, 3 * rank) for rank in ranks
    ]
    assert "order" not in found
    assert found["kept"] == [1, 2]
    assert found["notes"] == ["of all", "rank3: of one"]
    assert found["charts"] == [{"kind": "bars", "part": "ops"}]


def test_operators_that_only_some_processes_have() -> None:
    """As stages of a pipeline, and in another order."""
    first, second = content(0, 3), content(1, 5)
    second["ops"] = second["ops"][:0:-1]
    found = merge(["a", "b"], {"a": first, "b": second}.__getitem__)
    rows = {row["name"]: row for row in found["ops"]}
    assert list(rows) == ["op0", "op1", "op2", "op4", "op3"]
    assert {name: row["calls"] for name, row in rows.items()} == {
        "op0": 0,
        "op1": 1 + 2,
        "op2": 2 + 3,
        "op3": 4,
        "op4": 5,
    }
    assert (rows["op0"]["slowest"], rows["op4"]["slowest"]) == ("a", "b")
    assert rows["op4"]["skew"] == 1


def test_an_index_gives_the_same_and_is_not_used_for_another_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = {rank: content(rank) for rank in range(RANKS)}
    folder = written(tmp_path / "out", contents)
    plain = show(capsys, str(folder), "--json")
    for rank in range(RANKS):
        path = folder / f"rank{rank}/profile.json"
        size = len(json.dumps(contents[rank]))
        (path.parent / index_of("profile")).write_text(packed(contents[rank], size))
        path.write_text(" " * size if rank else json.dumps(contents[0]))  # Only the first is read.
    assert show(capsys, str(folder), "--json") == plain
    changed = content(2)
    changed["by_module"][""]["calls"] = 1000
    (folder / "rank2/profile.json").write_text(json.dumps(changed))
    for text in ("", "[]", "{}\n{}\n{}", "\n\n"):
        (folder / "rank3" / index_of("profile")).write_text(text)
        (folder / "rank3/profile.json").write_text(json.dumps(contents[3]))
        found = json.loads(show(capsys, str(folder), "--json"))
        assert found[0]["by_module"][""]["calls"] == 0 + 1 + 1000 + 3 + 4


def test_a_result_says_how_its_figures_are_merged() -> None:
    every = [
        {"format": "a/1", "merge": {"score": "min", "seconds": "sum"}, "score": n, "seconds": n}
        for n in (3, 1, 2)
    ]
    found = merge(["0", "1", "2"], lambda process: every[int(process)])
    assert (found["score"], found["seconds"]) == (1, 6)


def model(weights: dict[str, int], **more: Any) -> dict[str, Any]:
    """Return a result about weights, of which the process has some."""
    return {
        "format": "a/1",
        "merge": {
            **dict.fromkeys(("weights", "elements", "parameters"), "shared"),
            "block": "same",
        },
        "block": 4,
        "parameters": sum(weights.values()),
        "total": {"parameters": sum(weights.values())},
        "weights": [{"name": name, "elements": size} for name, size in weights.items()],
        **more,
    }


@pytest.mark.parametrize(
    ("processes", "parameters"),
    [
        ([{"a": 6, "b": 3}] * 3, 9),  # All have the same.
        ([{"a": 6}, {"b": 6}, {"c": 3}], 15),  # Each has layers of its own.
        ([{"a": 6}, {"b": 6}, {"b": 6}, {"a": 6}], 12),  # Two have the same layers.
        ([{"a": 6}, {"a": 6, "b": 3}], 9),
        ([{"a": 6, "b": 3}, {"b": 3, "c": 1}], "4 to 9"),  # It is not known how many are in both.
    ],
)
def test_what_belongs_to_the_model_counts_once(
    processes: list[dict[str, int]], parameters: int | str
) -> None:
    every = [model(weights) for weights in processes]
    found = merge([*map(str, range(len(every)))], lambda process: every[int(process)])
    assert (found["parameters"], found["total"]["parameters"]) == (parameters, parameters)
    assert found["block"] == 4
    sizes = {name: size for weights in processes for name, size in weights.items()}
    assert {row["name"]: row["elements"] for row in found["weights"]} == sizes


def test_a_file_cannot_say_a_kind_that_is_none() -> None:
    merges: list[dict[str, Any]] = [{"calls": "bogus", "x": ["calls"]}, {"calls": 3, "x": {}}]
    for said in merges:
        content = {"format": "a/1", "merge": said, "calls": 2, "x": 1, "rows": [{"x": 4}]}
        found = merge(["rank0", "rank1"], dict.fromkeys(("rank0", "rank1"), content).__getitem__)
        assert (found["calls"], found["x"]) == (4, 2)


def test_what_distinguishes_rows() -> None:
    every = [
        {
            "format": "a/1",
            "merge": {"operands": ["op", "what"], "faults": []},
            "operands": [{"op": "mul", "what": what, "seen": 1} for what in order],
            "faults": [{"name": "mul", "step": 2}],
            "twice": [{"name": "mul", "calls": 1}] * 2,
        }
        for order in ("xy", "yx")
    ]
    found = merge(["rank0", "rank1"], lambda process: every[int(process[-1])])
    assert [(row["what"], row["seen"]) for row in found["operands"]] == [("x", 2), ("y", 2)]
    assert found["faults"] == [
        {"process": process, "name": "mul", "step": 2} for process in ("rank0", "rank1")
    ]
    # A name that several rows have says of none what it is about.
    assert [(row["process"], row["calls"]) for row in found["twice"]] == [
        *(("rank0", 1), ("rank0", 1), ("rank1", 1), ("rank1", 1))
    ]


def test_texts_where_others_have_numbers_and_rows_without_a_key() -> None:
    every = [{"format": "a/1", "x": 1, "rows": [{"v": 1}, {"v": "a"}]} for _ in range(2)]
    every[1] = {"format": "a/1", "x": "many", "rows": [{"v": 2}, {"v": "a"}, {"v": 3}]}
    found = merge(["0", "1"], lambda process: every[int(process)])
    assert found["x"] == "(differs)"
    assert [(row["process"], row["v"]) for row in found["rows"]] == [
        *(("0", 1), ("0", "a"), ("1", 2), ("1", "a"), ("1", 3))
    ]


def test_show_merges_and_names_first_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "out", {rank: content(rank) for rank in (0, 1, 3)})
    state = RunState("train.py", 101, "r", 1, RANKS, ended=True, problem="ended by SIGTERM")
    (folder / "rank1" / STATE).write_text(state.to_json())
    (folder / "rank3" / STATE).write_text(RunState("train.py", 103, "r", 3, RANKS).to_json())
    lines = show(capsys, str(folder)).splitlines()
    assert lines[:3] == [
        "Of 5 ranks there are no results of 2, 4",
        "rank1: train.py (process 101) ended by SIGTERM",
        "rank3: train.py (process 103) did not end: it was killed or has crashed; nothing was "
        "written until then",
    ]
    assert lines[3] == "3 processes/profile.json: profile/1"
    op2 = next(line.split() for line in lines if line.startswith("op2 "))
    assert str((0 + 2) + (1 + 2) + (3 + 2)) in op2
    csv = show(capsys, str(folder), "--part", "by_module", "--csv")
    assert csv.splitlines() == ["name,calls", ",4", "layer,3"]
    assert json.loads(show(capsys, str(folder), "--json"))[0]["by_module"][""] == {"calls": 4}


def test_show_of_some_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "out", {rank: content(rank) for rank in range(RANKS)})
    for given, calls in (("0,3", 3), ("1:4", 6), (" 4 ", 4), ("0:5", 10)):
        found = json.loads(show(capsys, str(folder), "--ranks", given, "--json"))
        assert found[0]["by_module"][""]["calls"] == calls
    assert json.loads(show(capsys, str(folder), "--ranks", "4", "--json")) == [content(4)]
    for given, problem in (("7", "no results of rank 7"), ("x", "write 0,3 or 0:4")):
        assert app.parse(["show", str(folder), "--ranks", given]) == 2
        assert problem in capsys.readouterr().err
    assert app.parse(["show", str(folder / "rank0/profile.json"), "--ranks", "0"]) == 2
    assert "is not the folder of a run of several processes" in capsys.readouterr().err


def test_a_restarted_rank_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "out", {rank: content(rank) for rank in range(2)}, 2)
    again = folder / "rank1-restart2"
    again.mkdir()
    (again / "profile.json").write_text(json.dumps(content(4)))
    (folder / "rankings").mkdir()
    (folder / "rankings/profile.json").write_text(json.dumps(content(4)))
    found = json.loads(show(capsys, str(folder), "--json"))
    assert [row["name"] for row in found[0]["ranks"]] == ["rank0", "rank1-restart2"]
    assert found[0]["by_module"][""] == {"calls": 4}


@pytest.mark.slow
def test_many_processes_are_read_by_several(tmp_path: Path) -> None:
    folder = written(tmp_path / "out", {rank: content(rank) for rank in range(200)}, 200)
    command = [sys.executable, "-m", "amanda", "show", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (found,) = json.loads(done.stdout)
    assert [row["name"] for row in found["ranks"]] == [f"rank{rank}" for rank in range(200)]
    assert found["by_module"][""]["calls"] == sum(range(200))
    assert found["ops"][1]["bytes"] == 400


def test_an_empty_part_stays_empty() -> None:
    results = {
        "a": {"format": "x/1", "allocators": {}, "ops": [{}, {}]},
        "b": {"format": "x/1", "allocators": {"gpu": 3}, "ops": [{}]},
    }
    for names in (["a"], ["a", "a"]):
        found = merge(names, results.__getitem__)
        assert found["allocators"] == {}
        assert found["ops"] == [{"process": "a"}] * 2
    found = merge(["a", "b"], results.__getitem__)
    assert found["allocators"] == {"gpu": 3}
    assert [row["process"] for row in found["ops"]] == ["a", "a", "b"]
