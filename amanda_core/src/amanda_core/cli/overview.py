"""The overview: the tools that `amanda run` uses if none is named, and what they answer together.

Owns how an overview is found, by the entry-point group ``amanda.overviews``. The core knows neither
its tools nor its sentences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from amanda_core.cli.reports import load_first
from amanda_core.plugins.installed import TOOL_GROUP, installed
from amanda_core.results import Result

__all__ = ["LINES", "OVERVIEW_GROUP", "PAGE", "Overview", "default_tools", "find_overview"]

OVERVIEW_GROUP = "amanda.overviews"
#: How many lines an overview may have; the page is one more.
LINES = 9
#: Name of the page in the folder of results.
PAGE = "report.html"


class Overview(Protocol):
    """The tools of a run without `-t`, and what they answer together.

    Attributes:
        tools: The tools to run, as they are written after ``-t``.
    """

    @property
    def tools(self) -> Sequence[str]:
        """The tools to run, as they are written after ``-t``."""

    def lines(self, results: Mapping[str, Result]) -> Sequence[str]:
        """Return sentences about the results of these tools, at most `LINES`.

        Args:
            results: The results by the name of the tool. One that failed has none.
        """


def find_overview() -> Overview | None:
    """Return the overview of the first installed distribution that has one, or None.

    Raises:
        MissingExtraError: It cannot be loaded.
    """
    found: Any = load_first(OVERVIEW_GROUP, "overview")
    return found  # type: ignore[no-any-return]


def default_tools(overview: Overview) -> tuple[str, ...]:
    """Return the tools of an overview that are not blocked."""
    blocked = {found.name for found in installed(TOOL_GROUP) if found.blocked}
    return tuple(tool for tool in overview.tools if tool.partition(":")[0] not in blocked)
