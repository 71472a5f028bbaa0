"""The result of `quantize`: scales of weights and activations, and what was not reached.

Owns how it is shown and written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from amanda_core.results import Table
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.rendering import Tabular, fields_of, format_count, render_json
from amanda_tools.kit.weights.coverage import UnreachedWeight, describe_coverage

__all__ = ["QuantizeResult", "QuantizedActivation", "QuantizedWeight"]


@dataclass
class QuantizedWeight:
    """A quantized weight.

    Attributes:
        name: Its name in the model.
        op: Readable name of the first operator that uses it.
        source: ``file:line`` of the operator's call, or None.
        shape: Its shape.
        format: The number format.
        scales: The scales, in the order of the weight's axes; those of each execution are the first
            one's if they change. None are kept of a copy that is quantized in its place, such as
            one in another dtype.
        scales_shape: Their shape: along each axis of the weight the number of groups that have a
            scale, or 1 where all elements share it.
        sqnr: Signal-to-quantization-noise ratio in dB; None if nothing is lost or no scale is kept.
        zeros: The numbers of the value 0, in the order of the scales; none if the grid lies around
            0, which is then number 0.
    """

    name: str
    op: str
    source: str | None
    shape: list[int]
    format: str
    scales: list[float]
    scales_shape: list[int]
    sqnr: float | None
    zeros: list[float] = field(default_factory=list)


@dataclass
class QuantizedActivation:
    """A quantized operand that is not a weight.

    Attributes:
        op: Readable name of the operator.
        operand: The operand's role, or its position.
        source: ``file:line`` of the operator's call, or None.
        format: The number format.
        seen: In how many executions its range was observed.
        low: Smallest value seen; None if none was.
        high: Largest value seen; likewise.
        scale: Distance of neighbouring values; None if it is made in each execution, or not yet.
        zero: The number of the value 0.
    """

    op: str
    operand: str
    source: str | None
    format: str
    seen: int
    low: float | None
    high: float | None
    scale: float | None
    zero: float


@dataclass
class QuantizeResult(Tabular):
    """The quantized weights and activations, and their grids.

    Attributes:
        method: ``static``, ``dynamic``, ``lsq``, ``lsq+`` or ``tqt``.
        weights: The weights.
        activations: The other operands.
        uncalibrated: Operands and experts that no execution has reached during calibration.
        parameters: How many elements the matrices among the parameters of the models have.
        reached: How many of these are read in quantized form.
        unreached: The others: which parameters, how many elements, and why.
        tool_seconds: Time that ranges and scales took.
        notes: What cannot be quantized, and why.
    """

    records = "weights", QuantizedWeight

    method: str
    weights: list[QuantizedWeight] = field(default_factory=list)
    activations: list[QuantizedActivation] = field(default_factory=list)
    uncalibrated: list[str] = field(default_factory=list)
    parameters: int = 0
    reached: int = 0
    unreached: list[UnreachedWeight] = field(default_factory=list)
    tool_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def table(self) -> Table:
        """Return a table with a row for each weight and each other operand."""
        rows: list[tuple[object, ...]] = [
            (w.name or w.op, "weight", w.format, len(w.scales), *_ends(w.scales), _number(w.sqnr))
            for w in self.weights
        ]
        rows += [
            (a.op, a.operand, a.format, a.seen, *_ends([a.scale] * (a.scale is not None)), "")
            for a in self.activations
        ]
        parts = [
            f"{self.method}: {format_count(len(self.weights), 'weight')} and "
            f"{format_count(len(self.activations), 'other operand')} quantized"
        ]
        if self.uncalibrated:
            named = ", ".join(self.uncalibrated[:4])
            more = f" and {len(self.uncalibrated) - 4} more" if len(self.uncalibrated) > 4 else ""
            parts.append(f"NOT calibrated: {named}{more}")
        parts.append(f"ranges took {self.tool_seconds:.3g} s")
        parts += describe_coverage(self.parameters, self.reached, self.unreached)
        columns = ("of", "operand", "format", "scales or calls", "smallest", "largest", "SQNR (dB)")
        return Table("; ".join(parts + self.notes), columns, rows)

    def to_json(self) -> str:
        """Return the result with all scales as JSON."""
        drawn = [
            charts.figures(
                charts.figure("weights", len(self.weights)),
                charts.figure("other operands", len(self.activations)),
                charts.figure("elements not reached", self.parameters - self.reached or None),
            ),
            charts.bars(
                "Signal-to-noise ratio of weights",
                [("weight", "weights", "name")],
                _SQNR,
                note="The noisiest weights come first: less is worse.",
            ),
        ]
        merge = {
            **dict.fromkeys(("weights", "parameters", "reached", "elements"), "shared"),
            "activations": ["op", "operand"],
            "low": "min",
            "high": "max",
        }
        content = {"format": "amanda.quantize/1", "merge": merge, **fields_of(self)}
        return render_json({**content, "charts": drawn})


_SQNR = charts.measure("SQNR", "sqnr", unit="dB", lowest=True)


def decibels(signal: float, noise: float) -> float | None:
    """Return the ratio of two sums of squares in dB; None if either is 0 or not finite."""
    if not (0 < noise < math.inf and 0 < signal < math.inf):
        return None
    return 10 * math.log10(signal / noise)


def _ends(scales: list[Any]) -> tuple[object, object]:
    return (min(scales), max(scales)) if scales else ("", "")


def _number(value: float | None) -> object:
    return "" if value is None else value
