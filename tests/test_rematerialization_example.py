"""The example of rematerialization at work: trained as plain, within each budget."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]

FILE = Path(__file__).parents[1] / "examples/rematerialization/train_within_a_budget.py"


def test_digits_are_trained_within_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("train_within_a_budget", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all(line.endswith("as plain") for line in lines[1:])
