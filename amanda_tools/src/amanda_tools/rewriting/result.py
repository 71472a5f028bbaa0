"""Result of rewriting: what was rewritten, what was not, and why."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from amanda_core.results import Table
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.rendering import (
    Tabular,
    describe_overhead,
    fields_of,
    format_count,
    render_json,
)

__all__ = ["RewriteResult", "Rewritten"]


#: Name of an operator in a reason, such as ``conv1/conv2d`` or ``add``.
_NAME = re.compile(r"(?<=used by )[^\s,]+|[^\s,]+/[^\s,]+")


@dataclass
class Rewritten:
    """One place that matches a pattern.

    Attributes:
        rule: Name of the rule.
        name: Readable name of the last operator.
        source: ``file:line`` of its call, or None.
        ops: Names of the operators, in the order of execution.
        refused: Why it is not rewritten, or no longer rewritten; None if it is.
        rewritten: Number of times that it was rewritten: executions in eager modes, graphs
            elsewhere.
        fallbacks: Reason why executions were not rewritten -> their number.
        kept: Number of inner values that the program kept, so that they had to be computed.
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
class RewriteResult(Tabular):
    """Result of rewriting.

    Attributes:
        matches: One entry for each match.
        rules: Names of the rules whose patterns were searched for.
        tool_seconds: The part of `wall_seconds` spent in the tool, without the replacements.
        wall_seconds: Time from the first operator that the tool looked at to the last.
        notes: Namespaces in which nothing is rewritten, and why.
    """

    records = "matches", Rewritten

    matches: list[Rewritten] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def rewritten(self) -> int:
        """Return the number of times that any match was rewritten."""
        return sum(match.rewritten for match in self.matches)

    @property
    def reasons(self) -> dict[str, int]:
        """Return why matches were refused and executions not rewritten: reason -> number, the most
        frequent first.

        Reasons that differ only in the names of operators are one reason, with ``…`` for a name.
        """
        found: Counter[str] = Counter()
        for match in self.matches:
            if match.refused is not None and match.refused not in match.fallbacks:
                found[_NAME.sub("…", match.refused)] += 1
            for reason, number in match.fallbacks.items():
                found[_NAME.sub("…", reason)] += number
        return dict(found.most_common())

    def table(self) -> Table:
        """Return a table with one row for each match."""
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
        matches = format_count(len(self.matches), "match", "matches")
        notes = [f"{matches}, {refused} refused; rewritten {format_count(self.rewritten, 'time')}"]
        if self.reasons:
            reasons = (f"{number} as {reason}" for reason, number in self.reasons.items())
            notes.append(f"not rewritten: {', '.join(reasons)}")
        if not self.rules:
            notes.append("No rules were given, so nothing was looked for: name some as `rules`")
        notes += self.notes
        notes += describe_overhead("the tool", self.tool_seconds, self.wall_seconds)
        return Table(
            "; ".join(notes), ("op", "rule", "ops", "rewritten", "fell back", "why not"), rows
        )

    def to_json(self) -> str:
        """Return the whole result as JSON."""
        refused = sum(match.refused is not None for match in self.matches)
        drawn = [
            charts.figures(
                charts.figure("matches", len(self.matches)),
                charts.figure("times rewritten", self.rewritten),
                charts.figure("refused", refused),
            )
        ]
        if self.matches:
            times = charts.measure("times rewritten", "rewritten")
            by = [("rule", "matches", "rule"), ("place", "matches", "")]
            drawn.append(charts.bars("Rewritten", by, times))
        if self.reasons:
            count = charts.measure("times", "value")
            drawn.append(charts.bars("Why not", [("reason", "reasons", "")], count))
        content = {"format": "amanda.rewrite/1", **fields_of(self), "reasons": self.reasons}
        return render_json({**content, "charts": drawn})
