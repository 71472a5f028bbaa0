"""The result of `sensitivity`: the operators in the order of the damage.

Owns how it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from amanda_core.results import OpFigures, Table
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.rendering import Tabular, fields_of, format_count, render_json

__all__ = ["SensitiveOp", "SensitivityResult"]

#: For how many operators the table says why their damage was not measured.
_NAMED = 8


@dataclass
class SensitiveOp:
    """The damage that changing the operands of one operator does.

    Attributes:
        name: Readable name of the operator.
        id: Its op id.
        namespace: Where it runs.
        source: ``file:line`` of its call, or None.
        operands: How many of its operands are changed.
        executions: In how many executions their noise was measured.
        sqnr: Signal-to-quantization-noise ratio of its noisiest operand in dB; None if there is no
            noise.
        output_sqnr: The same of its first output, if only this operator is changed; None where it
            cannot be executed again.
        output_divergence: The Kullback-Leibler divergence of the softmax of that output from what
            it is without the change, in nats; likewise.
        passes: How many backward passes reached it.
        damage: Half the mean of the squared change of what the backward passes begin with, to first
            order; None where it was not measured.
        weights: Key of each parameter, or part of one, among the operands -> how many elements it
            has.
        unmeasured: Why the damage, or a part of it, was not measured, although that of other
            operators was; else empty.
    """

    name: str
    id: int
    namespace: str
    source: str | None
    operands: int
    executions: int = 0
    sqnr: float | None = None
    output_sqnr: float | None = None
    output_divergence: float | None = None
    passes: int = 0
    damage: float | None = None
    unmeasured: str = ""
    weights: dict[str, int] = field(default_factory=dict)


@dataclass
class SensitivityResult(Tabular):
    """The operators, the most sensitive first. Those that were not measured are the last.

    Attributes:
        change: What is done to each operator.
        ops: The operators. Without a backward pass their order is that of the noise.
        tool_seconds: Time that measuring took.
        notes: What was not measured, and why.
        weights: Number format of the weights; empty if they are pruned instead.
    """

    records = "ops", SensitiveOp

    change: str
    ops: list[SensitiveOp] = field(default_factory=list)
    tool_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    weights: str = ""

    def table(self) -> Table:
        """Return a table with a row for each operator."""
        rows = [
            (
                op.name,
                op.operands,
                _shown(op.sqnr),
                _shown(op.output_sqnr),
                _shown(op.output_divergence),
                _damage(op),
                op.passes,
            )
            for op in self.ops
        ]
        by = "damage" if any(op.damage is not None for op in self.ops) else "noise of operands"
        parts = [f"{format_count(len(self.ops), 'operator')} by {by} of {self.change}"]
        parts.append(f"measuring took {self.tool_seconds:.3g} s")
        parts += [f"{op.name}: {op.unmeasured}" for op in self.ops if op.unmeasured][:_NAMED]
        columns = (
            *("op", "operands", "SQNR (dB)", "output SQNR (dB)", "output KL"),
            *("damage", "passes"),
        )
        return Table("; ".join([*parts, *self.notes]), columns, rows)

    def op_figures(self) -> Iterable[OpFigures]:
        """Return the figures of each operator."""
        for op in self.ops:
            figures = {"damage": op.damage} if op.damage is not None else {}
            yield OpFigures(op.namespace, op.id, op.name, False, figures)

    def to_json(self) -> str:
        """Return the result as JSON."""
        drawn = [
            charts.figures(
                charts.figure("operators", len(self.ops)),
                charts.figure("most sensitive", self.ops[0].name if self.ops else None),
            ),
            charts.bars(
                "Sensitivity",
                [("operator", "ops", "name")],
                charts.measure("damage", "damage"),
                charts.measure("SQNR", "sqnr", unit="dB", lowest=True),
                charts.measure("SQNR of outputs", "output_sqnr", unit="dB", lowest=True),
                charts.measure("divergence of outputs", "output_divergence"),
            ),
        ]
        content = {"format": "amanda.sensitivity/1", "merge": {"operands": "range"}}
        return render_json({**content, **fields_of(self), "charts": drawn})


def _damage(op: SensitiveOp) -> object:
    return "not measured" if op.damage is None and op.unmeasured else _shown(op.damage)


def _shown(value: float | None) -> object:
    return "" if value is None else value
