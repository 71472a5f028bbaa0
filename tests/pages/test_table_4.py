"""The page with the lines of the pruning tools has what is counted, and within the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from example_scripts import load_benchmark

pytestmark = pytest.mark.one_interceptor

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def table() -> Any:
    return load_benchmark("table_4")


def test_the_page_is_current(table: Any) -> None:
    page = (ROOT / "docs/tools/table-4.md").read_text()
    # Print them by `python -m maintenance.benchmarks.table_4`. Shared modules change for other
    # reasons.
    rows, _, shared = table.tables().partition("\n\n")
    assert rows in page
    for line in shared.splitlines()[2:]:
        assert line.split("|")[1] in page, line


def test_tools_are_shorter_than_those_of_the_paper(table: Any) -> None:
    for project in table.PROJECTS:
        assert table.counts(project.modules)[1] <= project.amanda, project.name
