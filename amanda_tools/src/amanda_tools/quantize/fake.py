"""Fake quantization: the values that quantized numbers have, by the driver's arithmetic.

Owns the functions that routines call. They have no side effects, so that graphs may contain
them.
"""

from __future__ import annotations

from typing import Any

from amanda_core.engine.action import staged
from amanda_core.interface.facts import Facts
from amanda_tools.kit.tensors.arithmetic import arithmetic_of, widened
from amanda_tools.kit.tensors.types import is_real
from amanda_tools.quantize.formats import EPSILON, Format, Grid
from amanda_tools.quantize.operands import with_item

__all__ = ["constants", "fake_quantize", "quantize_item", "quantize_now"]


@staged
def fake_quantize(
    value: Any,
    *,
    facts: Facts,
    scale: Any,
    inverse: Any,
    zero: Any,
    limits: tuple[float, float],
    float8: str,
    offset: Any = None,
    blocks: tuple[int, ...] = (),
) -> Any:
    """Return the value that a quantized number in place of each element would have.

    It has no side effects, so it may become part of a graph.

    Args:
        value: A tensor of floating point numbers; anything else is returned as it is.
        facts: The driver's facts about tensors.
        scale: The scale, which broadcasts to it.
        inverse: 1 / scale. Products with it are those of torch's kernels.
        zero: The number of the value 0; None if it is 0.
        limits: The smallest and the largest number.
        float8: The type of the numbers if they are not integers.
        offset: What is subtracted from a value before, and added again; None for nothing.
        blocks: The shape of the value in which the scale broadcasts to it; empty if it is its own.
    """
    if not is_real(facts, value):
        return value
    arithmetic, dtype = arithmetic_of(facts, value), facts.dtype(value)
    if blocks:
        made = {"facts": facts, "scale": scale, "inverse": inverse, "zero": zero}
        parts, shape = arithmetic.reshape(value, blocks), [n or 0 for n in facts.shape(value) or ()]
        new = fake_quantize(parts, limits=limits, float8=float8, **made)
        return arithmetic.reshape(new, shape)
    numbers = widened(facts, value)
    if offset is not None:
        new = arithmetic.quantized(numbers - offset, scale, inverse, zero, limits) + offset
        return arithmetic.astype(new, dtype)
    if not float8:
        new = arithmetic.quantized(numbers, scale, inverse, zero, limits)
        return arithmetic.astype(new, dtype)
    wide = facts.dtype(numbers)
    numbers = arithmetic.astype(arithmetic.clip(numbers * inverse, *limits), float8)
    return arithmetic.astype(arithmetic.astype(numbers, wide) * scale, dtype)


@staged
def quantize_item(value: Any, *, item: int | None, **made: Any) -> Any:
    """Do so to an item of a list, or to a value that is none if `item` is None."""
    return with_item(value, item, fake_quantize(value if item is None else value[item], **made))


def quantize_now(
    value: Any,
    *,
    facts: Facts,
    axes: tuple[int, ...] | None,
    form: Format,
    scale: Any = None,
) -> tuple[Any, Any]:
    """Return a value after fake quantization by the symmetric grid of its own range, and its scale.

    Args:
        value: A tensor of floating point numbers.
        facts: The driver's facts about tensors.
        axes: The axes whose elements share a scale; None for all, however many there are.
        form: The number format.
        scale: The scale, if it is not that of the value.
    """
    if scale is None:
        arithmetic = arithmetic_of(facts, value)
        largest = arithmetic.largest(widened(facts, value), axes)
        scale = arithmetic.clip(largest / form.highest, EPSILON)
    limits = (-form.highest, form.highest)
    return fake_quantize(
        value,
        facts=facts,
        scale=scale,
        inverse=1.0 / scale,
        zero=None,
        limits=limits,
        float8=form.float8,
    ), scale


def constants(facts: Facts, grid: Grid, like: Any) -> dict[str, Any]:
    """Return the arguments of `fake_quantize` that a grid stands for.

    Args:
        facts: The driver's facts about tensors.
        grid: The grid; its arrays broadcast to the values.
        like: A tensor on the device of the values.
    """

    def number(array: Any) -> Any:
        return float(array.reshape(())) if array.size == 1 else facts.tensor(array, like)

    inverse = (1 / grid.scale).astype(grid.scale.dtype)
    return {
        "scale": number(grid.scale),
        "inverse": number(inverse),
        "zero": number(grid.zero) if grid.zero.any() else None,
        "limits": (grid.lowest, grid.highest),
        "float8": grid.float8,
        **({"blocks": grid.blocks} if grid.blocks else {}),
    }
