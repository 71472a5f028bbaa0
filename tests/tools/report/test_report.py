"""The report of a run: charts that name what is there, one file, also of a run that ended badly."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from every_tool import TOOLS
from torch import nn

import amanda
from amanda_core.cli.reports import MARK
from amanda_tools.report import report

#: What a page may have beside its data, in bytes.
LARGEST = 5_000_000
SCRIPT = """
import os, signal, sys, torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    if step == 2:
        exec(sys.argv[1])
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Return the content of each tool's file, after a step of training."""
    tools = {name: TOOLS[name]() for name in TOOLS if " " not in name}
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(8 * 36, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amanda.apply(*tools.values()):
        for _ in range(2):
            optimizer.zero_grad()
            outputs = model(torch.ones(2, 3, 8, 8))
            loss: Any = nn.functional.cross_entropy(outputs, torch.ones(2).long())
            loss.backward()
            optimizer.step()
    return {name: json.loads(tool.result().to_json()) for name, tool in tools.items()}


def data(page: str, name: str) -> Any:
    """Return what a page contains for its scripts."""
    found = re.search(f'id="data-{name}">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])


def test_charts_name_what_the_results_have(results: dict[str, Any]) -> None:
    drawn = re.findall(r"^amanda\.charts\.(\w+) =", "\n".join(scripts()), re.MULTILINE)
    for tool, content in results.items():
        for chart in content.get("charts", ()):
            where = f"{tool}: {chart.get('title', chart['kind'])}"
            assert chart["kind"] in drawn, where
            if chart["kind"] == "graph":
                continue
            if chart["kind"] == "figures":
                assert all(item["label"] and item["value"] is not None for item in chart["items"])
                continue
            for choice in chart.get("by", [chart]):
                rows = content[choice["part"]]
                rows = list(rows.values()) if isinstance(rows, dict) else rows
                assert rows, where
                whole = chart.get("value", ())
                measures = chart.get("measures", ())
                fields = [
                    *([whole] if isinstance(whole, str) else whole),
                    *(chart.get(key) for key in ("row", "column", "color", "label", "marked")),
                    *(field for measure in measures for field in measure["values"]),
                    *chart.get("values", ()),
                    *([chart["list"], "name"] if "list" in chart else [chart.get("x")]),
                    *(choice.get("group") or "").split("|"),
                ]
                for field in filter(None, fields):
                    assert all(has(row, field) for row in rows), f"{where}: {field}"
            if "list" in chart:
                assert all(len(row[chart["list"]]) == len(content[chart["x"]]) for row in rows)


def has(row: Any, field: str) -> bool:
    """Return True if a row has a field, which may be a field of a field."""
    if not isinstance(row, dict):
        return field == "value"  # An object of numbers has rows of a name and a value.
    first, _, rest = field.partition(".")
    return first in row and (not rest or row[first] is None or has(row[first], rest))


def scripts() -> list[str]:
    """Return the scripts that draw charts: the report's own, and the graph's."""
    pages = [resources.files(f"amanda_tools.{name}") / "page" for name in ("report", "graph")]
    return [file.read_text("utf-8") for page in pages for file in page.iterdir()]


def test_the_page_has_all_results_and_is_small_beside_them(results: dict[str, Any]) -> None:
    page = report(results, "train.py", ["a line"], "a problem")
    assert data(page, "facts") == {"title": "train.py", "lines": ["a line"], "problem": "a problem"}
    found = data(page, "results")
    assert found.keys() == results.keys()
    assert found["flops"] == json.loads(
        re.sub(r"(?<=: )(\d{17,})", r'"\1"', json.dumps(results["flops"]))
    )
    assert len(report({}, "nothing")) < LARGEST
    assert MARK in page[:1000].encode()
    assert len(page) < LARGEST + len(json.dumps(results))
    # JavaScript would round larger numbers.
    [op, *_] = found["latency"]["ops"]
    assert op["id"] == str(results["latency"]["ops"][0]["id"])


def test_what_is_too_large_for_a_page_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amanda_tools.report.contents.LIMIT", 1000)
    charts = [{"kind": "bars", "part": "long"}, {"kind": "bars", "part": "short"}]
    content = {"format": "x/1", "long": ["y" * 2000], "short": [1], "charts": charts}
    [found] = data(report({"x": content}, "t"), "results").values()
    assert found["charts"] == charts[1:]
    assert "long" not in found
    assert found["notes"] == ["long is too large for this page: 2004 bytes"]


@pytest.mark.parametrize("odd", [None, 1, "x", {}, [None, 1, ["kind"], {"kind": ["graph"]}]])
def test_charts_and_notes_that_are_none_do_not_hide_the_result(odd: Any) -> None:
    [found] = data(
        report({"x": {"format": "x/1", "charts": odd, "notes": odd}}, "t"), "results"
    ).values()
    assert found["format"] == "x/1"
    assert all(isinstance(chart, dict) for chart in found["charts"])


@pytest.mark.slow
@pytest.mark.one_interceptor
@pytest.mark.parametrize(
    ("last", "problem", "status"),
    [
        ("", "", 0),
        ("1 / 0", "Ended by ZeroDivisionError: division by zero", 1),
        ("sys.exit(3)", "Ended with status 3", 3),
        ("os.kill(os.getpid(), signal.SIGTERM)", "Ended by SIGTERM in <module> (<string>:1)", -15),
        ("raise KeyboardInterrupt", "Ended by KeyboardInterrupt: ", -2),
    ],
)
def test_a_run_writes_its_report_however_it_ends(
    last: str, problem: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    tools = [option for name in ("latency", "memory", "flops") for option in ("-t", name)]
    command = [sys.executable, "-m", "amanda", "run", *tools, "-o", "out", "--html", "r.html"]
    command += ["train.py", last or "pass"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert done.returncode == status, done.stderr
    page = (tmp_path / "r.html").read_text()
    facts = data(page, "facts")
    assert (facts["title"], facts["problem"]) == ("train.py", problem)
    found = data(page, "results")
    assert list(found) == ["latency", "memory", "flops"]
    steps = 3 if not last else 2
    assert sum(op["calls"] for op in found["flops"]["ops"]) == 2 * steps
    # A file that is not a report is not replaced, and nothing runs.
    (tmp_path / "r.html").write_text("mine")
    command[command.index("out")] = "other"
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert again.returncode == 2
    assert "exists already" in again.stderr
    assert (tmp_path / "r.html").read_text() == "mine"
