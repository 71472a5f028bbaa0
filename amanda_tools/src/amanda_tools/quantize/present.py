"""Operands that are not weights: what is known of their ranges, and grids of present values.

Owns the rules of Q8BERT: all operands of an operator are quantized at once, since the grid of a
bias is the product of those of both factors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from amanda_core.action import staged
from amanda_tools.quantize.arithmetic import Arithmetic, quantize_now
from amanda_tools.quantize.formats import EPSILON, Format, Grid
from amanda_tools.quantize.learned import Step
from amanda_tools.quantize.observers import Histogram
from amanda_tools.quantize.operands import Operand
from amanda_tools.quantize.result import QuantizedActivation

__all__ = ["INT32", "Activation", "Plan", "at_once", "at_present", "shown"]

#: The format of a bias.
INT32 = Format("int32", 32, float(2**31 - 1))


@dataclass
class Activation:
    """An operand that is not a weight."""

    op: str
    role: str
    source: str | None
    histogram: Histogram = field(default_factory=Histogram)
    grid: Grid | None = None
    step: Step | None = None
    #: Running mean of the largest magnitudes.
    mean: float | None = None
    #: The arguments of `fake_quantize`, made from `grid` when first needed.
    made: dict[str, Any] | None = None


@dataclass
class Plan:
    """How one operand is quantized by its present values."""

    operand: Operand
    form: Format
    axes: tuple[int, ...]
    one: Activation | None = None


def at_once(
    *values: Any, plans: list[Plan], arithmetic: Arithmetic, positions: list[int], mean: Any = None
) -> Any:
    """Quantize operands by their present ranges, and a bias by the product of both scales."""
    found = list(values)
    scales: list[Any] = []
    for plan in plans:
        index, item = positions.index(plan.operand.position), plan.operand.item
        value = found[index] if item is None else found[index][item]
        scale = None
        if plan.operand.is_bias:
            scale = arithmetic.flat(scales[0]) * arithmetic.flat(scales[1])
        elif mean is not None and plan.one is not None:
            largest = mean(plan.one, arithmetic.largest(arithmetic.wide(value), plan.axes))
            scale = arithmetic.at_least(largest / plan.form.highest, EPSILON)
        new, scale = quantize_now(
            value, arithmetic=arithmetic, axes=plan.axes, form=plan.form, scale=scale
        )
        scales.append(scale)
        if item is None:
            found[index] = new
        else:
            found[index] = type(values[index])(
                new if i == item else one for i, one in enumerate(found[index])
            )
    return found[0] if len(found) == 1 else found


@staged
def at_present(*values: Any, **given: Any) -> Any:
    """Do so without a running mean, and so without side effects."""
    return at_once(*values, **given)


def shown(one: Activation, form: Format) -> QuantizedActivation:
    """Return what the result says of an operand."""
    known = one.histogram.low <= one.histogram.high
    scale = None
    if one.step is not None:
        scale = float(one.step.scale().reshape(()))
    elif one.grid is not None:
        scale = float(one.grid.scale.reshape(()))
    return QuantizedActivation(
        one.op,
        one.role,
        one.source,
        form.name,
        one.histogram.seen,
        one.histogram.low if known else None,
        one.histogram.high if known else None,
        scale,
        0.0 if one.grid is None else float(one.grid.zero.reshape(())),
    )
