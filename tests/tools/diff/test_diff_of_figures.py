"""`amanda diff` of results without recorded tensors: their figures."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn

import amanda
from amanda_core.cli import main
from amanda_core.results.output import Output
from amanda_tools.flops import Flops
from amanda_tools.sparsity import Sparsity

pytestmark = pytest.mark.one_interceptor


def run(folder: Path, batch: int, sparsity: bool = False) -> None:
    tools: dict[str, Any] = {"flops": Flops(), **({"sparsity": Sparsity()} if sparsity else {})}
    with amanda.apply(*tools.values()):
        nn.Linear(4, 8, bias=False)(torch.ones(batch, 4))
    output = Output(folder, list(tools))
    for name, tool in tools.items():
        output.write(name, tool.result())


def diff(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[object, str]:
    with pytest.raises(SystemExit) as caught:
        main(["diff", *map(str, arguments)])
    read = capsys.readouterr()
    return caught.value.code, read.out + read.err


def test_the_figures_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    for folder, batch, sparsity in ((a, 2, False), (b, 3, False), (c, 2, True)):
        run(folder, batch, sparsity)
    status, text = diff(capsys, a, b, "--json")
    found = json.loads(text)
    (macs,) = (one for one in found["figures"] if one["label"] == "a forward pass")
    assert (status, macs["a"], macs["b"]) == (1, 2 * 4 * 8, 3 * 4 * 8)
    assert macs["change"] == pytest.approx(0.5)
    schema = resources.files("amanda_tools.diff").joinpath("schema.json").read_text("utf-8")
    jsonschema.Draft202012Validator(json.loads(schema)).validate(found)
    assert "a forward pass" in (said := diff(capsys, a, b)[1])
    assert "+50.0%" in said
    assert diff(capsys, a / "flops.json", a / "flops.json")[0] == 0
    status, text = diff(capsys, a, c)
    assert status == 2
    assert "Only in B: sparsity: " in text
    status, text = diff(capsys, a / "flops.json", c / "sparsity.json")
    assert status == 2
    assert "no figure in common" in text
    assert diff(capsys, a, b, "--rtol", 1)[0] == 3


def test_the_figures_of_each_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, batches in (("a", (2, 2)), ("b", (2, 3)), ("c", (2,))):
        for rank, batch in enumerate(batches):
            run(tmp_path / name / f"rank{rank}", batch)
    a, b, c = (tmp_path / name for name in "abc")
    status, text = diff(capsys, a, b, "--json")
    macs = [one for one in json.loads(text)["figures"] if one["label"] == "a forward pass"]
    assert status == 1
    assert [(one["result"], one["a"], one["b"]) for one in macs] == [
        *(("rank0/flops", 2 * 4 * 8, 2 * 4 * 8), ("rank1/flops", 2 * 4 * 8, 3 * 4 * 8))
    ]
    assert diff(capsys, a, b, "--ranks", "0")[0] == 0
    status, text = diff(capsys, a, c)
    assert status == 2
    assert "Only in A: rank1/flops: " in text
