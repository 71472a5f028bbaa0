"""Common operator types of JAX's operators: primitives, and functions that JAX itself jitted."""

from __future__ import annotations

from typing import Any

from amanda_core.driver_kit import Declarations, OpContext

__all__ = ["DECLARATIONS", "describe"]

DECLARATIONS = Declarations(__package__)
_CONVOLUTION = "conv_general_dilated"
_SPACE = "DHW"


def describe(context: OpContext) -> None:
    """Add the common types, roles and layouts to the context of an op or backward op."""
    common_type = DECLARATIONS.describe(context)
    if context.op_type == _CONVOLUTION:
        _describe_convolution(context)
    elif common_type == "matmul":
        _describe_product(context)


def _describe_convolution(context: OpContext) -> None:
    attrs = context.attrs
    numbers = attrs["dimension_numbers"]
    rank = len(numbers.rhs_spec) - 2
    if not 1 <= rank <= len(_SPACE):
        return
    # Inputs with holes are how a transposed convolution is written.
    transposed = any(length != 1 for length in attrs["lhs_dilation"])
    context["type"] = f"conv_transpose{rank}d" if transposed else f"conv{rank}d"
    context["layout"] = _layout(numbers.lhs_spec, "NC" + _SPACE[-rank:])
    context["weight_layout"] = _layout(numbers.rhs_spec, "OI" + _SPACE[-rank:])


def _layout(axes: Any, letters: str) -> str:
    """Return the letters in the order of a tensor's axes."""
    found = [""] * len(letters)
    for axis, letter in zip(axes, letters, strict=True):
        found[axis] = letter
    return "".join(found)


def _describe_product(context: OpContext) -> None:
    ranks = [getattr(value, "ndim", 0) for value in context.get_inputs() or ()]
    numbers = context.attrs.get("dimension_numbers")
    contracted = numbers[0] if numbers is not None else ((ranks[0] - 1,), (max(ranks[1] - 2, 0),))
    reads = context.weights
    # `weight @ x`, as in Equinox.
    side = 0 if 0 in reads and 1 not in reads else 1
    if side == 0:
        context["input_roles"] = ("weight", "input")
    if ranks[side] == 2 and len(contracted[side]) == 1:
        context["weight_layout"] = "IO" if contracted[side][0] == 0 else "OI"
