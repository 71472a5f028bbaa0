"""Reports: found by their entry point, written whole or not at all, opened in a browser.

The page itself is that of another distribution.
"""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from amanda_core.cli import app
from amanda_core.cli.reports import MARK, REPORT_GROUP, ReportPage
from amanda_core.errors import MissingExtraError, OutputError, ResultError

from .conftest import Installed
from .making import Point

SHIPPED = SimpleNamespace(name="amanda-pages", version="1.0")


def point(load: Callable[[], Any]) -> Point:
    return Point("html", load, REPORT_GROUP, SHIPPED)


def page(results: Any, title: str, lines: Any, problem: str) -> str:
    return json.dumps([results, title, list(lines), problem])


def breaks(*_: Any) -> Any:
    raise RuntimeError("no ink")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with two results, and a file that is none."""
    found = tmp_path / "mine"
    found.mkdir()
    for name, content in (("a", {"format": "a/1"}), ("b", {"format": "b/1"}), ("c", [1])):
        (found / f"{name}.json").write_text(json.dumps(content))
    return found


@pytest.mark.parametrize("has_browser", [True, False])
def test_results_open_in_a_browser(
    has_browser: bool,
    installed: Installed,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed.points.append(point(lambda: page))
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append if has_browser else breaks)
    assert app.parse(["show", str(folder), "--open"]) == 0
    written = Path(capsys.readouterr().out.strip())
    assert opened == ([written.as_uri()] if has_browser else [])
    expected = [{"a": {"format": "a/1"}, "b": {"format": "b/1"}}, "mine", [], ""]
    assert json.loads(written.read_text()) == expected
    # One file alone, which is named as it is.
    assert app.parse(["show", str(folder / "b.json"), "--open"]) == 0
    [contents, title, *_] = json.loads(Path(capsys.readouterr().out.strip()).read_text())
    assert (list(contents), title) == (["b"], "b.json")


def test_without_a_report_it_is_said_what_to_install(
    installed: Installed, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert app.parse(["show", str(folder), "--open"]) == 2
    assert "pip install amanda-tools" in capsys.readouterr().err
    # Before the program runs.
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    html = str(tmp_path / "r.html")
    command = ["run", "--no-config", "-t", f"{__file__}:Missing", "-o", str(tmp_path / "o")]
    assert app.parse([*command, "--html", html, str(script)]) == 2
    said = capsys.readouterr()
    assert "No installed distribution writes reports" in said.err
    assert "ran" not in said.out
    assert not (tmp_path / "o").exists()  # The reservation has ended.

    installed.points.append(point(breaks))
    with pytest.raises(MissingExtraError, match=r"amanda-pages 1\.0 cannot be loaded.*no ink"):
        ReportPage(tmp_path / "r.html")


def test_a_page_is_written_whole_or_not_at_all(
    installed: Installed, folder: Path, tmp_path: Path
) -> None:
    installed.points.append(point(lambda: breaks))
    files = sorted(folder.glob("*.json"))
    with pytest.raises(ResultError, match="no ink"):
        ReportPage(tmp_path / "new/r.html").write(files, "x")
    assert not (tmp_path / "new").exists()
    installed.points[:] = [point(lambda: page)]
    ReportPage(tmp_path / "new/r.html").write(files, "x")
    ReportPage(tmp_path / "new/r.html", "rank1").write(files, "x", ["l"], "p")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "r-rank1.html",
        "r.html",
    ]
    assert json.loads((tmp_path / "new/r-rank1.html").read_text())[1:] == ["x", ["l"], "p"]


def test_what_is_there_is_replaced_only_by_force_and_never_through_a_link(
    installed: Installed, folder: Path, tmp_path: Path
) -> None:
    installed.points.append(point(lambda: page))
    other, link = tmp_path / "other", tmp_path / "r.html"
    other.write_text("mine")
    link.symlink_to(other)
    for force in (False, True):
        if force:
            ReportPage(link, force=True).write([folder / "a.json"], "x")
        else:
            with pytest.raises(OutputError, match="exists already"):
                ReportPage(link)
    assert other.read_text() == "mine"
    assert not link.is_symlink()
    assert json.loads(link.read_text())[1] == "x"
    with pytest.raises(OutputError, match="exists already"):
        ReportPage(folder, force=True)
    # An earlier report is replaced, but not through a link.
    link.write_text(f"<!doctype html>\n{MARK.decode()}\n")
    ReportPage(link).write([folder / "a.json"], "again")
    assert json.loads(link.read_text())[1] == "again"
    link.unlink()
    other.write_text(MARK.decode())
    link.symlink_to(other)
    with pytest.raises(OutputError, match="exists already"):
        ReportPage(link)
    with pytest.raises(OutputError, match="cannot be written to"):
        ReportPage(other / "r.html")
