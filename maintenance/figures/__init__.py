"""Figures on pages: each comes from a results file, by one generator.

A page whose tables a program measures has a file in `results`: the cells of its tables, when, at
which commit, on which machine and with which versions they were measured, by which command, and a
fingerprint of the sources that they measure. Another page repeats such a cell between two comments,
``<!-- figure: NAME -->`` and ``<!-- end -->``, and `FIGURES` says which cell NAME is. `python -m
maintenance.figures` renews these; tests compare pages with files. So pages cannot contradict.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["FIGURES", "MEASURED", "Cells", "cells", "figures_of", "filled", "record", "stale"]

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results")
#: Days after which a result is old.
DAYS = 30
TORCH = ("amanda_core/src", "amanda_driver_torch/src")
ALL = (*TORCH, "amanda_driver_tf/src", "amanda_tools/src")

#: The cells of a page: "row | column" -> text, without emphasis.
Cells = dict[str, str]


class Measured(NamedTuple):
    """A page whose tables a program measures.

    Attributes:
        page: The page, by its path.
        command: What measures it.
        sources: Folders of what it measures.
    """

    page: str
    command: str
    sources: tuple[str, ...]


#: Name of the results file -> what it is of.
MEASURED = {
    "trust": Measured("maintenance/sweeps/trust.md", "nox -s sweep", ALL),
    "others": Measured("maintenance/sweeps/others/others.md", "nox -s others", ALL),
    "reports": Measured("docs/reports.md", "nox -s reports", ALL),
    "times": Measured("docs/benchmarks/README.md", "nox -s bench", TORCH),
    "instructions": Measured("docs/benchmarks/instructions.md", "nox -s bench", TORCH),
    "operators": Measured("docs/benchmarks/operators.md", "nox -s bench", TORCH),
    "tools": Measured("docs/benchmarks/tools.md", "nox -s bench", ALL),
    "peers": Measured("docs/benchmarks/peers.md", "nox -s bench", ALL),
    "compiled": Measured("docs/benchmarks/compiled.md", "nox -s bench", TORCH),
    "start": Measured("docs/benchmarks/start.md", "nox -s bench", ("amanda_core/src",)),
    "tensorflow": Measured(
        "docs/benchmarks/tensorflow.md", "nox -s bench", ("amanda_core/src", "amanda_driver_tf/src")
    ),
    "references": Measured("docs/references.md", "nox -s references", ("amanda_tools/src",)),
    "backends": Measured("docs/backends.md", "nox -s backends", ALL),
}


def total(column: str) -> Callable[[Cells], str]:
    """Return what sums the numbers of a column."""

    def summed(found: Cells) -> str:
        numbers = [v for k, v in found.items() if k.endswith(f"| {column}") and v[:1].isdigit()]
        return f"{sum(int(number.replace(',', '')) for number in numbers):,}"

    return summed


def _overhead(row: str, column: str) -> Callable[[Cells], str]:
    """Return what a ratio adds, in percent."""

    def overhead(found: Cells) -> str:
        (ratio,) = [
            value
            for key, value in found.items()
            if key.split(" | ")[0] == row and key.split(" | ")[1].startswith(column)
        ]
        return f"{100 * (float(ratio) - 1):.1f}%"

    return overhead


_IDLE = "amanda native: nothing inserted"
#: Name of a figure -> the results file, and what it is of its cells.
FIGURES: dict[str, tuple[str, Callable[[Cells], str]]] = {
    "trust.comparisons": ("trust", total("comparisons")),
    "trust.unexplained": ("trust", total("unexplained")),
    "instructions.idle.forward": ("instructions", _overhead(_IDLE, "forward")),
    "instructions.idle.training": ("instructions", _overhead(_IDLE, "training")),
    "reports.right": ("reports", lambda found: str(list(found.values()).count("right"))),
    "reports.all": ("reports", lambda found: str(sum(k.endswith("| ") for k in found))),
}
_FIGURE = re.compile(r"<!-- figure: ([\w.]+) -->(.*?)<!-- end -->", re.DOTALL)
_MEASURED = re.compile(r"\n<!-- measured -->.*?<!-- end -->\n", re.DOTALL)
_SEPARATOR = re.compile(r"^\|[\s:|-]+\|$")


def cells(text: str) -> Cells:
    """Return the cells of all tables of a page, by row and column."""
    found: Cells = {}
    columns: list[str] = []
    lines = text.splitlines()
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if not line.startswith("|"):
            columns = []
            continue
        row = [re.sub(r"\*\*|`", "", cell).strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if _SEPARATOR.match(line):
            continue
        if _SEPARATOR.match(below):
            columns = row
            continue
        for column, cell in zip(columns[1:], row[1:], strict=False):
            key = name = f"{row[0]} | {column}"
            number = 1
            while key in found:
                number += 1
                key = f"{name} | {number}"
            found[key] = cell
    return found


def fingerprint(blobs: Iterable[tuple[str, str]]) -> str:
    """Return a digest of files, given their paths and the ids that git gives their contents."""
    listing = "\n".join(f"{path} {blob}" for path, blob in sorted(blobs))
    return hashlib.sha256(listing.encode()).hexdigest()[:16]


def _is_source(path: str) -> bool:
    return not path.endswith((".pyc", ".so", ".pyd")) and ".egg-info" not in path


def sources_now(folders: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the files of folders, as `fingerprint` takes them."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and _is_source(name):
                data = path.read_bytes()
                blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
                yield name, blob.hexdigest()


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def measured_at(measured: Measured) -> str:
    """Return the commit at which the present cells of a page first stood in it."""
    now = cells((ROOT / measured.page).read_text("utf-8"))
    found = ""
    listing = _git("log", "--follow", "--format=commit %h", "--name-only", "--", measured.page)
    commit = ""
    for line in filter(None, listing.splitlines()):
        if line.startswith("commit "):
            commit = line.removeprefix("commit ")
        elif cells(_git("show", f"{commit}:{line}")) == now:
            found = commit
        else:
            break
    return found or _git("log", "-1", "--format=%h").strip()


def record(name: str, commit: str = "") -> None:
    """Write the results file of a page, and when it was measured into the page.

    Args:
        name: The page.
        commit: What was measured. Without it, it is the commit at which these figures first stood
            on the page, and nothing is written if they stand there already.
    """
    measured = MEASURED[name]
    page = ROOT / measured.page
    text = page.read_text("utf-8")
    found = cells(text)
    path = RESULTS / f"{name}.json"
    known = path.exists() and json.loads(path.read_text("utf-8"))["cells"] == found
    if known and not commit:
        return
    commit = _git("rev-parse", "--short", commit).strip() if commit else measured_at(measured)
    listing = _git("ls-tree", "-r", commit, "--", *measured.sources).splitlines()
    blobs = [(line.split("\t")[1], line.split()[2]) for line in listing]
    result = {
        "page": measured.page,
        "command": measured.command,
        "date": _git("log", "-1", "--format=%cs", commit).strip(),
        "commit": commit,
        "machine": {key: value for key, value in _facts(found) if key in _MACHINE},
        "versions": {key: value for key, value in _facts(found) if key not in _MACHINE},
        "sources": list(measured.sources),
        "fingerprint": fingerprint((path, blob) for path, blob in blobs if _is_source(path)),
        "cells": found,
    }
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")
    page.write_text(with_date(text, result), "utf-8")


_MACHINE = ("processor", "cores", "system", "memory (GiB)", "load when it began")


def _facts(found: Cells) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table of the machine and versions, if the page has one."""
    for key, value in found.items():
        row, _, column = key.partition(" | ")
        if column == "" and (row in _MACHINE or re.fullmatch(r"python|[a-z]+(-[a-z]+)*", row)):
            yield row, value


def with_date(text: str, result: Mapping[str, Any]) -> str:
    """Return a page with the line that says when and how its figures were measured."""
    line = f"Measured on {result['date']}, at commit `{result['commit']}`, by `{result['command']}`"
    note = f"\n<!-- measured -->\n*{line}.*\n<!-- end -->\n"
    title, _, rest = _MEASURED.sub("", text).partition("\n")
    return f"{title}\n{note}{rest}"


def results(name: str) -> dict[str, Any]:
    """Return the contents of a results file."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return found


def figures_of(text: str) -> list[tuple[str, str]]:
    """Return the names and texts of the figures of a page."""
    return [(match[1], match[2]) for match in _FIGURE.finditer(text)]


def filled(text: str) -> str:
    """Return a page with each of its figures as the results files have it."""

    def one(match: re.Match[str]) -> str:
        file, of = FIGURES[match[1]]
        return f"<!-- figure: {match[1]} -->{of(results(file)['cells'])}<!-- end -->"

    return _FIGURE.sub(one, text)


def stale(today: datetime.date) -> Iterator[str]:
    """Yield a line for each result that is older than it may be, or than what it measures."""
    for name, measured in MEASURED.items():
        found = results(name)
        age = (today - datetime.date.fromisoformat(found["date"])).days
        if age > DAYS:
            yield f"{name}: measured {age} days ago, on {found['date']}: {measured.command}"
        elif found["fingerprint"] != fingerprint(sources_now(measured.sources)):
            what = ", ".join(measured.sources)
            yield f"{name}: {what} changed since {found['date']}: {measured.command}"


def pages() -> list[Path]:
    """Return the pages that may repeat figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
