"""What docs/reports.md says of each report comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
from maintenance.reports import Report, reports

pytestmark = [pytest.mark.one_interceptor, pytest.mark.untraced]
PAGE = (Path(__file__).resolve().parents[2] / "docs/reports.md").read_text("utf-8")


@pytest.mark.parametrize("report", [pytest.param(one, id=one.path.stem) for one in reports()])
def test_a_report_comes_out_as_the_page_says(report: Report) -> None:
    pytest.importorskip("safetensors.numpy")
    row = next(line for line in PAGE.splitlines() if f"`{report.command}`" in line)
    outcome = report.run()
    assert outcome.right == ("**wrong**" not in row), outcome.shown
