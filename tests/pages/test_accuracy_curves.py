"""The pages of pruning, gates and budgets show what was measured, and it is good enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from example_scripts import load_benchmark

pytestmark = pytest.mark.one_interceptor

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def curves() -> Any:
    return load_benchmark("accuracy_curves")


def test_tables_and_pictures_are_those_of_the_rows(curves: Any) -> None:
    # Make them by `python -m maintenance.benchmarks.accuracy_curves`.
    for page, table in curves.TABLES.items():
        text = (ROOT / f"docs/tools/{page}.md").read_text(encoding="utf-8")
        assert table() in text, page
        assert f"({page}-curve.png)" in text
        assert (ROOT / f"docs/tools/{page}-curve.png").read_bytes()[:4] == b"\x89PNG"


def test_pruned_networks_learn_again(curves: Any) -> None:
    found = curves.grouped(curves.read("pruning"))
    for name, accuracy in (("global 90%", 94.2), ("2:4", 94.3)):
        assert len({row["seed"] for row in found[name]}) == 5
        assert curves.mean(found[name], "tuned")[0] >= accuracy


def test_budgets_hold_with_the_gradients_of_plain_training(curves: Any) -> None:
    for model, rows in curves.grouped(curves.read("rematerialize"), "model").items():
        within = [row for row in rows if row["way"] == "rematerialize"]
        assert len(within) == 10, model
        for row in within:
            assert (row["within"], row["equal"], row["statistics"]) == ("True",) * 3
        # The smaller the budget, the more is computed again.
        assert float(within[0]["work"]) > float(within[-1]["work"])
