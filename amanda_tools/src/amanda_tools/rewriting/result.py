"""What was rewritten, what was not, and why."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from amanda_core.results import Table
from amanda_tools.output.rendering import counted, dataframe, html_of, shares

__all__ = ["RewriteResult", "Rewritten"]


@dataclass
class Rewritten:
    """One place where a pattern fits.

    Attributes:
        rule: Name of the rule.
        name: Readable name of the last operator.
        source: ``file:line`` of its call, or None.
        ops: Names of the operators, the last one last.
        refused: Why it is not rewritten, or no longer, or None.
        rewritten: How often it was: executions in eager modes, graphs elsewhere.
        fallbacks: Why executions were left as they are -> how many.
        kept: Values inside of it that the program kept, and that were computed for it.
    """

    rule: str
    name: str
    source: str | None
    ops: list[str]
    refused: str | None = None
    rewritten: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    kept: int = 0


@dataclass
class RewriteResult:
    """All places where patterns fit.

    Attributes:
        matches: One entry for each.
        rules: Names of the rules whose patterns were looked for.
        tool_seconds: Time that the tool itself took, of `wall_seconds`; the replacements are not in
            it.
        wall_seconds: Time from the first to the last operator that was looked at.
    """

    matches: list[Rewritten] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0

    @property
    def rewritten(self) -> int:
        """How often anything was rewritten."""
        return sum(match.rewritten for match in self.matches)

    def table(self) -> Table:
        """One row for each match."""
        rows = [
            (
                match.name,
                match.rule,
                len(match.ops),
                match.rewritten,
                sum(match.fallbacks.values()),
                match.refused or "; ".join(match.fallbacks),
            )
            for match in self.matches
        ]
        refused = sum(match.refused is not None for match in self.matches)
        matches = counted(len(self.matches), "match", "matches")
        told = [f"{matches}, {refused} refused; rewritten {counted(self.rewritten, 'time')}"]
        if not self.rules:
            told.append("NO rules were given, so nothing was looked for: name some as `rules`")
        told += shares("the tool", self.tool_seconds, self.wall_seconds)
        return Table(
            "; ".join(told), ("op", "rule", "ops", "rewritten", "fell back", "why not"), rows
        )

    def to_json(self) -> str:
        """All of it."""
        return json.dumps({"format": "amanda.rewrite/1", **asdict(self)}, indent=1)

    def to_dataframe(self) -> Any:
        """One row for each match, as a `pandas.DataFrame`; needs pandas.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return dataframe(Rewritten, self.matches)

    def _repr_html_(self) -> str:
        return html_of([self.table()])
