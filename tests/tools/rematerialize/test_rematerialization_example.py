"""The example of rematerialization at work: trained as plain, within each budget."""

from __future__ import annotations

import pytest
from example_scripts import load_example

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]


def test_digits_are_trained_within_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    load_example("rematerialization/train_within_a_budget").main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert all(line.endswith("as plain") for line in lines[1:])
