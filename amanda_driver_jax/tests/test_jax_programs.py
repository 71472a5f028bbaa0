"""A sample of the programs of `maintenance.sweeps.jax_programs`, and that a difference is found."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

import amanda

ROOT = Path(__file__).resolve().parents[2]
#: They need one device.
SAMPLE = ["parameters in a dict", "custom_jvp", "loops and branches"]
MORE = ["NNX, scanned", "Linen, scanned", "Equinox, filters", "checkify", "Hessians", "donated"]


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("maintenance.sweeps.jax_programs")


@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated")  # Of a program of Flax.
@pytest.mark.parametrize(
    "name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_programs_compute_the_same_under_tools(sweep: Any, name: str) -> None:
    ways = ["watching", "None"] if name in SAMPLE else sweep.WAYS
    found = [*sweep.outcomes(name, ways)]
    assert len(found) == len(ways), found
    assert not [one for one in found if one[2]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Diffrax", "Optimistix"])
def test_solvers_live_while_all_values_are_captured(sweep: Any, name: str) -> None:
    pytest.importorskip(name.lower(), reason=f"{name} is installed by `nox -s jax_programs`")
    one = next(one for key, one in sweep.PROGRAMS.items() if key.startswith(name))
    assert sweep.outcome(one, sweep.observed(one.run), sweep.ALONE["capture"]) == ""


def test_a_difference_is_found(sweep: Any) -> None:
    class Doubles(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            if context["type"] == "matmul":
                context.insert_after_op(lambda value: value * 2)

    one = sweep.PROGRAMS["loops and branches"]
    expected = sweep.observed(one.run)
    assert "differs by" in sweep.outcome(one, expected, lambda: amanda.apply(Doubles()))

    def broken() -> Any:
        raise ValueError("planted")

    said = sweep.outcome(one._replace(run=broken), expected, lambda: amanda.apply(Doubles()))
    assert said == "ValueError: planted"


def test_the_page_shows_the_results_that_are_kept(sweep: Any) -> None:
    assert sweep.PAGE.read_text() == sweep.page()
    for file in sweep.RECORDS.glob("*.json"):
        assert json.loads(file.read_text())["programs"].keys() <= sweep.PROGRAMS.keys()


def test_results_of_several_runs_are_kept(
    sweep: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three, four = [*sweep.PROGRAMS][:4]
    monkeypatch.setattr(sweep, "RECORDS", tmp_path)
    for name, way, problem in (
        (one, "None", "result 0 differs"),
        (one, "watching", ""),
        (one, "None", ""),
        (two, "", "needs haiku"),
        (three, "watching", "ValueError: x"),
        (four, "tools", "ValueError: y"),
        (four, "memory", "ValueError: y"),
        *((four, way, "") for way in sweep.WAYS),
    ):
        sweep.record(name, way, problem)
    page = sweep.page()
    assert f"| {one} | equal (watching, None; {len(sweep.WAYS) - 2} ways not run) |" in page
    assert f"| {two} | needs haiku |" in page
    assert f"| {three} | watching: ValueError: x |" in page
    assert f"| {four} | equal |" in page
    assert f"| {[*sweep.PROGRAMS][4]} | not run |" in page
