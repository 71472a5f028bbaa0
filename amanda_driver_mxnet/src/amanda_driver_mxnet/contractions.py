"""The axes of MXNet's products: what `Facts.contraction` returns. Does not import MXNet."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from amanda_core.driver_kit import (
    OpContext,
    contraction_of_axes,
    contraction_of_equation,
    contraction_of_matmul,
)
from amanda_core.interface import Contraction

__all__ = ["contraction"]


def contraction(context: OpContext) -> Contraction | None:
    """Return the axes of a product's operands; None for other operators."""
    inputs, attrs = context.get_inputs() or (), context.attrs
    if context["type"] not in ("matmul", "einsum") or len(inputs) < 2:
        return None
    shapes = [tuple(one.shape or ()) for one in inputs]
    ranks = [len(shape) for shape in shapes]
    if "subscripts" in attrs:
        return contraction_of_equation(attrs["subscripts"], range(len(ranks)), ranks)
    if "tensordot" in context.op_type:
        summed = _summed(attrs, ranks)
        return None if summed is None else contraction_of_axes((0, 1), ranks[:2], summed)
    turned = tuple(str(attrs.get(f"transpose_{end}")) in ("True", "1") for end in ("a", "b"))
    if context.op_type == "dot":
        # Of arrays with more than two axes, it sums over the last and the first one.
        ends = (0 if turned[0] else -1,), (-1 if turned[1] else 0,)
        return contraction_of_axes((0, 1), ranks[:2], ends)
    if context.op_type.endswith("np_dot"):
        return contraction_of_axes((0, 1), ranks[:2], ((-1,), (max(ranks[1] - 2, 0),)))
    return contraction_of_matmul((0, 1), shapes[:2], (turned[0], turned[1]))


def _summed(attrs: Mapping[str, Any], ranks: list[int]) -> tuple[Any, Any] | None:
    """Return the axes over which `tensordot` sums; None if they are not known."""
    if "a_axes_summed" in attrs:
        names = "a_axes_summed", "b_axes_summed"
        ends = [ast.literal_eval(str(attrs[name])) for name in names]
    else:
        # The third argument, or an attribute in a graph.
        axes = attrs.get("2", attrs.get("axes"))
        axes = ast.literal_eval(axes) if isinstance(axes, str) else axes
        if axes is None:
            return None
        if isinstance(axes, int):
            return range(ranks[0] - axes, ranks[0]), range(axes)
        ends = list(axes)
    first, second = ((one,) if isinstance(one, int) else tuple(one) for one in ends)
    return first, second
