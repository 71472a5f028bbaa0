"""`amanda run --fail-if`: how conditions are written, and the exit status."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from pathlib import Path
from typing import Any, ClassVar

import pytest

from amanda_core import Tool
from amanda_core.cli.conditions import conditions
from amanda_core.errors import ConfigError

from .site import Site, distribution

TOOL = """
import json
import amanda
from amanda_core.results import Table

class Found:
    def table(self):
        return Table("", ("a",), [])
    def to_json(self):
        return "{}"
    def figures(self):
        return {"count": 3, "time": 0.0205, "unknown": None}

class Sized(amanda.Tool):
    figures = {"count": "", "time": "s", "unknown": ""}
    def result(self):
        return Found()
"""


class Measured(Tool):
    figures: ClassVar[Mapping[str, str]] = {"count": "", "time": "s", "peak": "B", "share": "%"}


class Otherwise(Tool):
    def __init__(self) -> None:
        self.figures = ["a"]  # type: ignore[misc,assignment]


class Numbers:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def figures(self) -> Mapping[str, Any]:
        return self.values


@pytest.mark.parametrize(
    ("text", "values", "said"),
    [
        ("m.count > 2", {"count": 3}, "'m.count > 2' holds: m.count is 3"),
        ("m.count>2e0", {"count": 2}, ""),
        ("m.count >= 2k", {"count": 2000}, "'m.count >= 2k' holds: m.count is 2000"),
        ("m.count != 0", {"count": 0}, ""),
        ("m.count == 0", {"count": 0}, "'m.count == 0' holds: m.count is 0"),
        ("m.time > 20ms", {"time": 0.0205}, "'m.time > 20ms' holds: m.time is 20.5 ms"),
        ("m.time > 21 ms", {"time": 0.0205}, ""),
        ("m.time < 0.03", {"time": 0.0205}, "'m.time < 0.03' holds: m.time is 20.5 ms"),
        ("m.peak > 1MiB", {"peak": 2**20}, ""),
        ("m.peak <= 1MiB", {"peak": 2**20}, "'m.peak <= 1MiB' holds: m.peak is 1.049 MB"),
        ("m.share < 50%", {"share": 0.25}, "'m.share < 50%' holds: m.share is 25.00%"),
        ("m.count > 1", {"count": None}, "m.count is not known, so 'm.count > 1' is not decided"),
        ("m.count > 1", {}, "m.count is not known, so 'm.count > 1' is not decided"),
        ("m.time > 1", {"time": nan}, "m.time is not known, so 'm.time > 1' is not decided"),
    ],
)
def test_a_condition_and_what_is_said(text: str, values: Any, said: str) -> None:
    results: Any = {"m": Numbers(values)}
    (condition,) = conditions([text], {"m": Measured()})
    assert condition.problem(results) == said


def test_a_result_that_failed_or_has_no_figures_decides_nothing() -> None:
    (condition,) = conditions(["m.count > 1"], {"m": Measured()})
    failing: Any = {"m": Numbers(None)}  # type: ignore[arg-type]
    assert "is not known: AttributeError" in condition.problem(failing)
    none: Any = {"m": object()}
    assert "is not known" in condition.problem(none)
    assert "is not known" in condition.problem({})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("m.count", "'m.count' is not a condition"),
        ("count > 1", "is not a condition"),
        ("m.count > x", "is not a condition"),
        ("m.cuont > 1", "have no figure m.cuont.*Did you mean 'm.count'?.*m.count, m.peak"),
        ("n.count > 1", "have no figure n.count"),
        ("o.a > 1", "have no figure o.a"),
        ("m.time > 1MB", "'MB' is not a unit of m.time.*Units of it: s, ms"),
        ("m.count > 1ms", "'ms' is not a unit of m.count"),
    ],
)
def test_what_is_no_condition_is_an_error(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        conditions([text], {"m": Measured(), "o": Otherwise()})


def test_the_exit_status_of_a_run(tmp_path: Path) -> None:
    site = Site(tmp_path)
    (site.path / "toysized.py").write_text(TOOL)
    distribution(site.path, "toy-sized", "1.0", "[amanda.tools]\nsized = toysized:Sized\n")
    site.write("train.py", "import sys\nprint('ran')\nsys.exit(int(sys.argv[1]))\n")

    def run(condition: str, status: str = "0", *flags: str) -> Any:
        command = ["run", "-t", "sized", *flags, "--fail-if", condition, "train.py", status]
        return site.amanda(*command)

    done = run("sized.count > 2")
    assert done.returncode == 4
    assert done.stderr.endswith("amanda: error: 'sized.count > 2' holds: sized.count is 3\n")
    assert run("sized.count > 3").returncode == 0
    assert run("sized.time > 20ms", "0", "-q").returncode == 4
    assert run("sized.unknown > 0").returncode == 4
    assert run("sized.count > 2", "3").returncode == 3  # The program's comes first.
    done = run("sized.cuont > 2")
    assert (done.returncode, done.stdout) == (2, "")  # Before the program starts.
    assert "Did you mean 'sized.count'?" in done.stderr
