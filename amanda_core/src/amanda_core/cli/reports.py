"""Reports: one page with results, which an installed distribution writes.

Owns how it is found, by the entry-point group ``amanda.reports``, and where its page is written.
The core knows nothing of the page.
"""

from __future__ import annotations

import os
import tempfile
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from amanda_core.errors import MissingExtraError, OutputError, ResultError
from amanda_core.plugins.installed import installed
from amanda_core.results import tables as results
from amanda_core.runtime.containment import contain, described

__all__ = ["REPORT_GROUP", "ReportPage", "is_result", "load_first", "open_report"]

REPORT_GROUP = "amanda.reports"

#: What a page has in its head, so that the next report may replace it.
MARK = b'<meta name="generator" content="Amanda">'
#: Bytes in which it stands.
_HEAD = 1000
#: ``(results, title, lines, problem)`` -> HTML.
_Report = Callable[[Mapping[str, Any], str, Sequence[str], str], str]
_FIX = "Run: pip install amanda-tools"


class ReportPage:
    """A page that is written when results are there.

    Args:
        path: The file.
        part: Name of one of several processes, which becomes part of the file's name.
        force: Whether to replace any file. An earlier report is always replaced, since its results
            are in files of their own.

    Raises:
        MissingExtraError: No installed distribution writes reports.
        OutputError: The file exists, or cannot be written to.
    """

    def __init__(self, path: Path, part: str = "", *, force: bool = False) -> None:
        named = path.with_name(f"{path.stem}-{part}{path.suffix}") if part else path
        self.path = Path(os.path.abspath(named))
        replaced = self.path.is_file() and (force or _is_report(self.path))
        if os.path.lexists(self.path) and not replaced:
            raise OutputError(
                f"{str(self.path)!r} exists already",
                fix="Name another file, or replace it with --force",
            )
        folder = next(parent for parent in self.path.parents if parent.exists())
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            raise OutputError(f"{str(folder)!r} cannot be written to", fix="Name another file")
        self._report: _Report | None = load_first(REPORT_GROUP, "report")
        if self._report is None:
            raise MissingExtraError("No installed distribution writes reports", fix=_FIX)

    def write(
        self, files: Sequence[Path], title: str, lines: Sequence[str] = (), problem: str = ""
    ) -> None:
        """Write the page, whole or not at all.

        Args:
            files: Files of results.
            title: What was run.
            lines: Further facts about the run.
            problem: How the run ended, if it did not end well.

        Raises:
            OutputError: The file cannot be written.
            ResultError: A file cannot be read.
        """
        self.write_contents(
            {file.stem: results.load(file) for file in files}, title, lines, problem
        )

    def write_contents(
        self,
        contents: Mapping[str, Any],
        title: str,
        lines: Sequence[str] = (),
        problem: str = "",
    ) -> None:
        """Write the page of results that are read already, by their names; else as `write`."""
        found = {name: content for name, content in contents.items() if is_result(content)}
        try:
            assert self._report is not None
            text = self._report(found, title, lines, problem)
        except BaseException as error:
            contain(error)
            raise ResultError(f"The report cannot be made: {described(error)}") from error
        # A link in its place is replaced, not followed.
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(new, flags, 0o666), "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(new, self.path)
        except OSError as error:
            raise OutputError(
                f"{str(self.path)!r} cannot be written: {error.strerror or error}"
            ) from error
        finally:
            with suppress(OSError):
                new.unlink(missing_ok=True)


def open_report(contents: Mapping[str, Any], title: str) -> Path:
    """Write a page of these results and show it in the browser, if there is one.

    Args:
        contents: Name of each result -> its JSON.
        title: What they are of.

    Returns:
        The page, a temporary file.
    """
    page = ReportPage(Path(tempfile.mkdtemp(prefix="amanda-")) / "report.html")
    page.write_contents(contents, title)
    with suppress(Exception):  # Without a browser the printed path is enough.
        webbrowser.open(page.path.as_uri())
    return page.path


def is_result(content: object) -> bool:
    """Return True for the content of a tool's file, which has a format."""
    return isinstance(content, dict) and isinstance(content.get("format"), str)


def _is_report(path: Path) -> bool:
    """Return True for a page of Amanda's. A link to one belongs to somebody else."""
    if path.is_symlink():
        return False
    try:
        with path.open("rb") as file:
            return MARK in file.read(_HEAD)
    except OSError:
        return False


def load_first(group: str, what: str) -> Any:
    """Load the first entry point of a group that is not blocked; return None if there is none.

    Args:
        group: The group.
        what: What its entry points are, for messages.

    Raises:
        MissingExtraError: It cannot be loaded.
    """
    points = [found for found in installed(group) if not found.blocked]
    try:
        return points[0].point.load() if points else None
    except BaseException as error:
        contain(error)
        raise MissingExtraError(
            f"The {what} of {points[0].origin} cannot be loaded: {described(error)}", fix=_FIX
        ) from error
