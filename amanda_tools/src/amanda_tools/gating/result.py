"""The result of dynamic pruning: how much of each operator was computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from amanda_core.results import Table
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.rendering import (
    Tabular,
    fields_of,
    format_count,
    format_percent,
    render_json,
)

__all__ = ["GatedOp", "GatingResult"]

#: Tool -> what gets a gate.
_GATED = {
    "prune_channels": "conv2d with a parameter as its weight, whose output another operator reads",
    "prune_positions": "residual block of conv2d, once the first execution has shown it",
    "prune_attention": "scaled_dot_product_attention with a layer_norm after it, once the first "
    "call has shown it",
}


@dataclass
class GatedOp:
    """An operator, a part of which is computed.

    Attributes:
        op: Its readable name.
        source: ``file:line`` of its call, or None.
        kept: How many channels, positions or blocks were kept, over all executions and samples.
        total: How many there were.
        macs: Multiply-accumulates of its first execution; 0 if unknown.
    """

    op: str
    source: str | None
    kept: float
    total: int
    macs: int

    @property
    def share(self) -> float:
        """The fraction that was kept; 1 if it was not executed yet."""
        return self.kept / self.total if self.total else 1.0


@dataclass
class GatingResult(Tabular):
    """How much was computed.

    Attributes:
        tool: Name of the tool.
        ops: The operators with gates.
    """

    records = "ops", GatedOp

    tool: str
    ops: list[GatedOp] = field(default_factory=list)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one execution of `ops`."""
        return sum(op.macs for op in self.ops)

    @property
    def effective_macs(self) -> int:
        """How many of these remain if what was pruned is not computed."""
        return round(sum(op.macs * op.share for op in self.ops))

    @property
    def kept(self) -> float:
        """The fraction that was kept of all channels, positions or blocks."""
        total = sum(op.total for op in self.ops)
        return sum(op.kept for op in self.ops) / total if total else 1.0

    def table(self) -> Table:
        """Return a table with a row for each operator."""
        title = [f"{self.kept:.1%} kept"]
        if not self.ops:
            title = self._why_none()
        if self.macs:
            left = format_percent(self.effective_macs, self.macs)
            title.append(f"{left} of {format_count(self.macs, 'MAC')} left")
        rows = [(op.op, f"{op.share:.1%}", op.macs, round(op.macs * op.share)) for op in self.ops]
        return Table("; ".join(title), ("op", "kept", "MACs", "left"), rows)

    def to_json(self) -> str:
        """Return the result as JSON."""
        rows = [{**fields_of(op), "share": op.share} for op in self.ops]
        drawn = [
            charts.figures(
                charts.figure("kept", self.kept if self.ops else None, "%"),
                charts.figure("MACs", self.macs or None),
                charts.figure("MACs left", self.effective_macs if self.macs else None),
            ),
        ]
        if self.ops:
            share = charts.measure("share", "share", unit="%")
            drawn.append(charts.bars("Kept", [("operator", "ops", "op")], share))
        sums = {"kept": self.kept, "macs": self.macs, "effective_macs": self.effective_macs}
        content = {"format": f"amanda.{self.tool}/1", "ops": rows, **sums, "charts": drawn}
        return render_json({**content, "notes": self._why_none()})

    def _why_none(self) -> list[str]:
        """Return why nothing was gated; nothing if something was."""
        return [] if self.ops else [f"nothing was gated: there was no {_GATED[self.tool]}"]
