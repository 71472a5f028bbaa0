"""`amanda diff` of two runs of several processes: rank by rank, and what only one of them has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import amanda
from amanda_core.cli import main
from amanda_core.results.output import Output
from amanda_tools.dump import Dump

pytestmark = pytest.mark.one_interceptor


def run(folder: Path, *weights: float) -> Path:
    """Write the dumps of ranks, each of a layer with this weight."""
    for rank, weight in enumerate(weights):
        tool, layer = Dump(), nn.Linear(2, 2)
        nn.init.constant_(layer.weight, weight)
        nn.init.zeros_(layer.bias)
        with amanda.apply(tool):
            layer(torch.ones(1, 2))
        Output(folder, ["dump"], part=f"rank{rank}").write("dump", tool.result())
    return folder


def diff(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[object, str]:
    with pytest.raises(SystemExit) as caught:
        main(["diff", *map(str, arguments)])
    return caught.value.code, capsys.readouterr().out


def test_each_rank_is_compared_with_its_counterpart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = run(tmp_path / "a", 1.0, 2.0, 3.0)
    b = run(tmp_path / "b", 1.0, 2.5)
    status, out = diff(capsys, a, b)
    assert status == 1
    lines = out.splitlines()
    assert lines[0] == "Only in A: rank2"
    assert lines[1].startswith("rank0: ")
    assert lines[2] == "rank1:"
    assert any("linear" in line for line in lines[3:])
    assert diff(capsys, a, b, "--ranks", "0")[0] == 0
    status, out = diff(capsys, a, b, "--json")
    found = json.loads(out[out.index("{") :])
    assert status == 1
    assert {name: one["same"] for name, one in found.items()} == {"rank0": True, "rank1": False}


def test_a_rank_that_only_one_run_has_is_no_difference_of_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = run(tmp_path / "a", 1.0, 2.0), run(tmp_path / "b", 1.0)
    assert diff(capsys, a, b)[0] == 2
    assert diff(capsys, b, a)[1].splitlines()[0] == "Only in B: rank1"
    assert diff(capsys, a / "rank0", b / "rank0")[0] == 0
    assert diff(capsys, a / "rank0", b / "rank0", "--ranks", "0")[0] == 3
