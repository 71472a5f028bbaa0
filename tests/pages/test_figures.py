"""Pages cannot contradict: a figure is that of its results file, wherever it is repeated."""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # `maintenance` lies in the root, which `-P` hides.

from maintenance import figures  # noqa: E402
from maintenance.figures import summaries  # noqa: E402

pytestmark = pytest.mark.one_interceptor

#: Pages written by hand that say how good or fast something is.
BY_HAND = ["README.md", "docs/README.md", "docs/overview.md", "docs/install.md"]
#: What looks like a measurement: a share, a ratio, a time.
MEASUREMENT = re.compile(r"\d[\d.,]*(?:%| times\b| ?(?:ns|µs|ms)\b)|\b\d{1,3}(?:,\d{3})+\b")


@pytest.mark.parametrize("name", figures.MEASURED)
def test_a_page_has_the_figures_of_its_results_file_and_their_date(name: str) -> None:
    result = figures.results(name)
    text = (ROOT / result["page"]).read_text("utf-8")
    assert figures.cells(text) == result["cells"], "python -m maintenance.figures records them"
    assert result["cells"]
    assert figures.with_date(text, result) == text
    datetime.date.fromisoformat(result["date"])
    assert re.fullmatch(r"[0-9a-f]{7,}", result["commit"])


def test_every_repeated_figure_is_that_of_its_file() -> None:
    found = []
    for page in figures.pages():
        text = page.read_text("utf-8")
        assert figures.filled(text) == text, f"{page}: python -m maintenance.figures renews it"
        found += figures.figures_of(text)
    assert {name for name, _ in found} <= figures.FIGURES.keys()
    assert len({name for name, _ in figures.figures_of((ROOT / "README.md").read_text())}) >= 4


@pytest.mark.parametrize("page", BY_HAND)
def test_a_page_written_by_hand_measures_nothing_itself(page: str) -> None:
    text = re.sub(r"(?s)```.*?```", "", (ROOT / page).read_text("utf-8"))
    text = re.sub(r"(?s)<!-- figure.*?<!-- end -->", "", text)
    assert MEASUREMENT.findall(text) == []


def test_summaries_are_those_of_their_logs() -> None:
    for name, (log, page) in summaries.LOGS.items():
        made = {"trust": summaries.trust, "others": summaries.others}[name]
        text = page.read_text("utf-8")
        assert text == made(log.read_text("utf-8"))
        assert len(text.splitlines()) < 50


def test_cells_totals_and_dates() -> None:
    page = "# T\n\ntext\n\n| a | `n` | m |\n|---|---|---|\n| x | 1,000 | **2** |\n| y | 3 | \\| |\n"
    found = figures.cells(page)
    assert found == {"x | n": "1,000", "x | m": "2", "y | n": "3", "y | m": "\\|"}
    assert figures.total("n")(found) == "1,003"
    result = {"date": "2026-01-01", "commit": "abc1234", "command": "nox -s bench"}
    dated = figures.with_date(page, result)
    assert figures.with_date(dated, result) == dated
    assert figures.cells(dated) == found


def test_what_is_old_or_measures_other_sources_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = figures.Measured("docs/start.md", "nox -s bench", ("maintenance/figures",))
    now = figures.fingerprint(figures.sources_now(measured.sources))
    result = {"date": "2026-01-01", "fingerprint": now}
    monkeypatch.setattr(figures, "MEASURED", {"start": measured})
    monkeypatch.setattr(figures, "results", lambda name: result)
    day = datetime.date(2026, 1, 31)
    assert list(figures.stale(day)) == []
    assert "31 days ago" in next(figures.stale(day + datetime.timedelta(days=1)))
    result["fingerprint"] = "other"
    assert "changed since" in next(figures.stale(day))
