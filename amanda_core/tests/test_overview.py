"""`amanda run` without a tool: the tools of an installed overview, and its lines."""

from __future__ import annotations

import json
from pathlib import Path

from .site import OTHERS, Site, distribution

MODEL = """
import toyframe

def model(count=1):
    x = toyframe.Value(2.0)
    for _ in range(count):
        with toyframe.scope("encoder"):
            x = toyframe.relu(x)
        toyframe.update([], 0.1)
"""
#: A distribution that gives an overview of two tools.
OVERVIEW = """
class Overview:
    tools = ("count:label=overview", "failing", "blocked")

    def lines(self, results):
        return [f"{name}: {result.tool.calls}" for name, result in results.items()] + ["more"] * 20

def report(results, title, lines, problem):
    return f"{title} {sorted(results)}"

overview = Overview()
broken = 1 / 0
"""
OVERVIEW_POINTS = """[amanda.overviews]
overview = toyoverview:overview
[amanda.reports]
html = toyoverview:report
[amanda.tools]
blocked = toytools:Counter
"""


def overview(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    (site.path / "toyoverview.py").write_text(OVERVIEW.replace("broken = 1 / 0\n", ""))
    distribution(site.path, "toy-overview", "1.0", OVERVIEW_POINTS)
    return site


def test_without_a_tool_an_overview_is_given(tmp_path: Path) -> None:
    site = overview(tmp_path)
    site.write("train.py", f"{MODEL}model(3)\nprint('done')\n")
    variables = {"AMANDA_DISABLE_PLUGINS": f"{OTHERS},blocked"}
    done = site.amanda("run", "train.py", **variables)
    assert (done.stdout, done.returncode) == ("done\n", 1)  # The result of one tool fails.
    noise = ("amanda: error", "amanda: warning")
    told = [line for line in done.stderr.splitlines() if not line.startswith(noise)]
    assert told[0] == "amanda: running train.py under count, failing"
    assert told[1] == "amanda: count: {'encoder/relu': 3}"
    assert told[2:] == ["amanda: more"] * 8
    folder = site.work / "amanda_results"
    assert json.loads((folder / "count.json").read_text())["options"]["label"] == "overview"

    variables["AMANDA_DISABLE_PLUGINS"] += ",failing"
    done = site.amanda("run", "train.py", **variables)
    page = site.work / "amanda_results-2" / "report.html"
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 12  # Two before it, and ten.
    assert done.stderr.splitlines()[-1] == f"amanda: report: {page}"
    assert page.read_text() == "train.py []"
    done = site.amanda("run", "-q", "--html", "mine.html", "train.py", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert (site.work / "mine.html").exists()
    # Tools that are named are run alone, and shown as ever.
    done = site.amanda("run", "-t", "count", "train.py", **variables)
    assert "more" not in done.stderr
    site.write("pyproject.toml", "[tool.amanda.tools]\ncount = {enable = false}\n")
    assert "No tool is named" in site.amanda("run", "train.py", **variables).stderr


def test_an_overview_that_cannot_be_loaded_or_made(tmp_path: Path) -> None:
    site = overview(tmp_path)
    site.write("train.py", f"{MODEL}model()\n")
    variables = {"AMANDA_DISABLE_PLUGINS": f"{OTHERS},blocked,failing"}
    (site.path / "toyoverview.py").write_text(
        OVERVIEW.replace("broken = 1 / 0\n", "").replace("return [", "return 1 / 0, [")
    )
    done = site.amanda("run", "train.py", **variables)
    assert done.returncode == 1
    assert "error: the overview cannot be made: ZeroDivisionError" in done.stderr
    assert (site.work / "amanda_results" / "count.json").exists()
    (site.path / "toyoverview.py").write_text(OVERVIEW)
    done = site.amanda("run", "train.py", **variables)
    assert done.returncode == 2
    assert "The overview of toy-overview 1.0 cannot be loaded: ZeroDivisionError" in done.stderr
