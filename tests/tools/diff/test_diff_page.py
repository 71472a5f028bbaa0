"""What `amanda diff` writes for others: JSON that follows its schema, and a page."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from commands import exit_status
from torch import nn

import amanda
from amanda_core.results.output import Output
from amanda_tools.dump import Dump
from amanda_tools.fingerprint import Fingerprint

pytestmark = pytest.mark.one_interceptor

SCHEMA = json.loads(resources.files("amanda_tools.diff").joinpath("schema.json").read_text("utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.norm(self.body(x)))
        return scores


def training(wrong: bool = False, dtype: torch.dtype = torch.float32, steps: int = 3) -> None:
    net = Net().to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(steps):
        if wrong and step == 1:
            net.norm.eps = 0.2
        net(torch.linspace(-1, 1, 24).reshape(4, 6).to(dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def fingerprint(folder: Path, part: str | None = None, norms: bool = False, **how: Any) -> Path:
    tool = Fingerprint(norms=norms)
    with amanda.apply(tool):
        training(**how)
    Output(folder, ["fingerprint"], part=part or "").write("fingerprint", tool.result())
    return folder


def dump(folder: Path, part: str | None = None, **how: Any) -> Path:
    tool = Dump(values=["inputs", "weights", "outputs"])
    with amanda.apply(tool):
        training(**how)
    Output(folder, ["dump"], part=part or "").write("dump", tool.result())
    return folder


#: Name -> records the two runs, and the exit status of their comparison.
PAIRS: dict[str, tuple[Callable[[Path], object], int]] = {
    "equal": (lambda at: (fingerprint(at / "a"), fingerprint(at / "b")), 0),
    "different": (lambda at: (fingerprint(at / "a"), fingerprint(at / "b", wrong=True)), 1),
    "shorter": (lambda at: (fingerprint(at / "a"), fingerprint(at / "b", steps=2)), 2),
    "norms": (
        lambda at: (
            fingerprint(at / "a", norms=True),
            fingerprint(at / "b", norms=True, wrong=True, dtype=torch.bfloat16),
        ),
        1,
    ),
    "ranks": (
        lambda at: [
            fingerprint(at / run, part=f"rank{rank}", wrong=run == "b" and rank == 1)
            for run in "ab"
            for rank in range(2)
        ],
        1,
    ),
    "dumps": (lambda at: (dump(at / "a"), dump(at / "b", wrong=True)), 1),
    "precisions": (
        lambda at: (dump(at / "a"), dump(at / "b", wrong=True, dtype=torch.bfloat16)),
        1,
    ),
    "dumps of ranks": (
        lambda at: [
            dump(at / run, part=f"rank{rank}", wrong=run == "b")
            for run in "ab"
            for rank in range(2)
        ],
        1,
    ),
}


@pytest.fixture(scope="module", params=list(PAIRS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, (record, status) = tmp_path_factory.mktemp("pair"), PAIRS[request.param]
    record(folder)
    return folder / "a", folder / "b", status, request.param


def test_json_follows_the_schema(pair: Any, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, status, _ = pair
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for more in ([], ["--limit", 1]):
        assert exit_status("diff", a, b, "--json", *more) == status
        content = json.loads(capsys.readouterr().out)
        VALIDATOR.validate(content)
        wrong = copy.deepcopy(content)
        (wrong if "format" in wrong else wrong["rank0"])["same"] = "yes"
        assert not VALIDATOR.is_valid(wrong)


def test_the_page_shows_where_values_differ(
    pair: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, status, name = pair
    page = tmp_path / "page.html"
    assert exit_status("diff", a, b, "--html", page) == status
    out = capsys.readouterr()
    assert f"amanda: report: {page}" in out.err
    text = page.read_text()
    results, facts = (
        json.loads(re.search(f'id="data-{part}">(.*?)</script>', text)[1])  # type: ignore[index]
        for part in ("results", "facts")
    )
    # The text of the page is that of the command.
    assert facts["lines"]
    for line in facts["lines"]:
        assert line.partition(": ")[2 if name == "dumps of ranks" else 0] in out.out
    for content in results.values():
        titles = [chart.get("title") for chart in content["charts"]]
        assert ("Where values differ" in titles) == bool(content["spread"])
        for one in content["spread"]:
            assert 0 < one["different"] <= one["values"]
    spread = [one for content in results.values() for one in content["spread"]]
    assert bool(spread) == (status == 1)
    if status == 1:
        # The normalization is wrong from the second step on. What comes before it is equal there.
        assert min(one["step"] for one in spread) == 1 or name in ("norms", "precisions")
        assert next(one["module"] for one in spread if one["step"] == 1) == "norm"
    if name == "ranks":
        assert {one["process"] for one in spread} == {"rank1"}


def test_a_file_that_is_no_page_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in "ab":
        fingerprint(tmp_path / run, steps=1)
    kept = tmp_path / "kept.html"
    kept.write_text("mine")
    assert exit_status("diff", tmp_path / "a", tmp_path / "b", "--html", kept) != 0
    assert "replace it with --force" in capsys.readouterr().err
    assert kept.read_text() == "mine"
    assert exit_status("diff", tmp_path / "a", tmp_path / "b", "--html", kept, "--force") == 0
    assert kept.read_text() != "mine"
    # An earlier page is replaced without being asked.
    assert exit_status("diff", tmp_path / "a", tmp_path / "b", "--html", kept) == 0


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status("diff", "--schema") == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
