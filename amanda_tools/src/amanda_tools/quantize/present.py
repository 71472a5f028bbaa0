"""Grids of present values: each execution quantizes by the ranges that it meets.

Owns the rules of Q8BERT: all operands of an operator are quantized at once, since the grid of a
bias is the product of those of both factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from amanda_core import OpContext
from amanda_core.engine.action import staged
from amanda_core.interface.facts import Facts
from amanda_core.interface.groups import Group
from amanda_tools.kit.tensors.arithmetic import arithmetic_of, widened
from amanda_tools.kit.tensors.types import is_real
from amanda_tools.kit.tensors.values import host
from amanda_tools.quantize.activations import Activation, Activations
from amanda_tools.quantize.fake import quantize_now
from amanda_tools.quantize.formats import EPSILON, Format
from amanda_tools.quantize.operands import Operand, shared_axes, value_at, with_item
from amanda_tools.quantize.options import Options
from amanda_tools.quantize.weights import Weights

__all__ = ["insert_present"]

ALONE = Group()
#: The format of a bias.
INT32 = Format("int32", 32, float(2**31 - 1))


@dataclass
class Plan:
    """How one operand is quantized by its present values."""

    operand: Operand
    form: Format
    axes: tuple[int, ...] | None
    one: Activation | None = None


def insert_present(
    context: OpContext,
    facts: Facts,
    operands: Sequence[Operand],
    options: Options,
    weights: Weights,
    activations: Activations,
    exported: bool = False,
) -> None:
    """Insert the quantization of an operator's operands by their present values.

    Args:
        context: The operator's context.
        facts: The driver's facts about tensors.
        operands: The operands.
        options: The user's options.
        weights: The weights of the tool.
        activations: Its other operands.
        exported: Whether for a program, in which a running mean is the last one.
    """
    plans: list[Plan] = []
    for operand in operands:
        rank = len(facts.shape(value_at(context, operand)) or ())
        is_weight = operand.weight is not None or operand.copied
        form = options.format_of(is_weight)
        axes = tuple(shared_axes(context, operand, rank, options.per)) if is_weight else None
        if operand.is_bias:
            if None not in (options.weights, options.activations) and not options.per_token:
                plans += [Plan(operand, INT32, ())] * (rank == 1)
        elif operand.weight is not None:
            form = options.format_for(operand.weight)
            if weights.prepare(context, facts, operand, operand.weight) and form is not None:
                plans.append(Plan(operand, form, axes))
        elif form is not None and operand.copied:
            plans.append(Plan(operand, form, axes))
        elif form is not None:
            one = activations.get(context, operand, exported)
            # Other executions may have another number of axes.
            plans.append(Plan(operand, form, (-1,) if rank and options.per_token else None, one))
    # A bias is quantized by the scales of both factors.
    factors = [plan for plan in plans if not plan.operand.is_bias]
    plans = [*factors, *(p for p in plans if p.operand.is_bias and len(factors) == 2)]
    if not plans:
        return
    positions = sorted({plan.operand.position for plan in plans})
    given: dict[str, Any] = {"plans": plans, "facts": facts, "positions": positions}
    group, _ = activations.groups.get(context.weights.root, (ALONE, ALONE))
    if group.size > 1:
        # They combine their ranges in each execution: one that is alone must not wait for ever.
        group.exchange(f"present ranges of {context.name}")
        given["group"] = group
    if options.ema:
        given["mean"] = partial(activations.running, facts=facts)
    routine = at_once if (options.ema and not exported) or group.size > 1 else at_present
    context.insert_before_op(routine, inputs=positions, **given)


def at_once(
    *values: Any,
    plans: list[Plan],
    facts: Facts,
    positions: list[int],
    mean: Any = None,
    group: Group = ALONE,
) -> Any:
    """Quantize operands by their present ranges, and a bias by the product of both scales.

    Args:
        values: The operands.
        plans: How they are quantized.
        facts: The driver's facts about tensors.
        positions: Their positions.
        mean: Takes an activation and its largest magnitude, and returns the running mean.
        group: The processes that may have parts of an activation.
    """
    found = list(values)
    scales: list[Any] = []
    for plan in plans:
        index, item = positions.index(plan.operand.position), plan.operand.item
        value = found[index] if item is None else found[index][item]
        if not is_real(facts, value):
            return None
        arithmetic, scale = arithmetic_of(facts, value), None
        if plan.operand.is_bias:
            scale = arithmetic.reshape(scales[0], (-1,)) * arithmetic.reshape(scales[1], (-1,))
        elif plan.one is not None and (mean is not None or group.size > 1):
            largest = arithmetic.largest(widened(facts, value), plan.axes)
            if group.size > 1 and plan.axes is None and facts.placement(value) is None:
                # It may be a part of one value, and if not, they have the same.
                array = group.reduce(host(facts, largest).array, "max")
                largest = facts.tensor(array, largest)
            if mean is not None:
                largest = mean(plan.one, largest)
            scale = arithmetic.clip(largest / plan.form.highest, EPSILON)
        new, scale = quantize_now(value, facts=facts, axes=plan.axes, form=plan.form, scale=scale)
        scales.append(scale)
        found[index] = with_item(found[index], item, new)
    return found[0] if len(found) == 1 else found


@staged
def at_present(*values: Any, **given: Any) -> Any:
    """Do so without side effects: without a running mean, or with one that does not change."""
    return at_once(*values, **given)
