"""ONNX's operators as the common operator types, with roles of inputs and layouts.

Owns what ``driver.toml`` cannot tell: types by attributes, ranks, and what an exporter wrote. Does
not import ONNX Runtime, since the types are names.
"""

from __future__ import annotations

import re
from typing import Any

from amanda_core.driver_kit import (
    Declarations,
    OpContext,
    contraction_of_equation,
    contraction_of_matmul,
)
from amanda_core.interface import Contraction

__all__ = ["DECLARATIONS", "contraction", "describe"]


def _plain(name: str) -> str:
    """Return the name of an operator in snake case."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


#: Also the vocabulary; `describe` finds the types that a rank or an attribute tells.
DECLARATIONS = Declarations(__package__, _plain)

_SPACE = {1: "W", 2: "HW", 3: "DHW"}
#: Operator -> the position of the input whose rank tells the type, and the type.
_RANKED = {
    "Conv": (1, "conv{}d"),
    "FusedConv": (1, "conv{}d"),
    "ConvInteger": (1, "conv{}d"),
    "QLinearConv": (3, "conv{}d"),
    "ConvTranspose": (1, "conv_transpose{}d"),
    "MaxPool": (0, "max_pool{}d"),
    "AveragePool": (0, "avg_pool{}d"),
    "QLinearAveragePool": (0, "avg_pool{}d"),
    "GlobalAveragePool": (0, "adaptive_avg_pool{}d"),
    "QLinearGlobalAveragePool": (0, "adaptive_avg_pool{}d"),
    "GlobalMaxPool": (0, "adaptive_max_pool{}d"),
}
#: Roles of operators whose scales and zero points stand between their operands.
_QUANTIZED = {
    "QLinearConv": ("input", "", "", "weight", "", "", "", "", "bias"),
    "QLinearMatMul": ("left", "", "", "right"),
}


def describe(context: OpContext) -> None:
    """Set the common keys of a context."""
    name, inputs = context.op_type, context.get_inputs() or ()
    ranks = [getattr(value, "ndim", 0) for value in inputs]
    common_type = DECLARATIONS.describe(context, _type(context, ranks))
    if name in _QUANTIZED:
        context["input_roles"] = _QUANTIZED[name]
    if context.get_op().domain == "com.microsoft.nchwc":
        return  # Blocks of channels are its last axis.
    if name in _RANKED and common_type is not None:
        space = _SPACE[int(common_type[-2])]
        context["layout"] = f"NC{space}"
        if common_type.startswith("conv"):
            context["weight_layout"] = f"{'IO' if 'transpose' in common_type else 'OI'}{space}"
    elif common_type == "linear":
        turned = name == "Gemm" and context.attrs.get("transB")
        context["weight_layout"] = "OI" if turned or name == "MatMulNBits" else "IO"
    elif common_type == "matmul" and len(ranks) > 1 and ranks[1] == 2:
        context["weight_layout"] = "IO"


def _type(context: OpContext, ranks: list[int]) -> str | None:
    """Return the common type of an operator."""
    name, exported = context.op_type, context.get_op().exported
    if name in _RANKED:
        place, pattern = _RANKED[name]
        rank = ranks[place] - 2 if place < len(ranks) else 0
        return pattern.format(rank) if rank in _SPACE else None
    if name == "Gather":
        # One that an exporter made of a table, or that picks rows of a matrix of weights.
        return "embedding" if exported == "embedding" else "slice"
    if name == "MatMul" and exported in ("linear", "addmm"):
        return "linear"
    if name == "Trilu":
        return "triu" if context.attrs.get("upper", 1) else "tril"
    return DECLARATIONS.get(name)


def contraction(context: OpContext) -> Contraction | None:
    """Return the axes of a product's operands; None for other operators."""
    inputs, attrs = context.get_inputs() or (), context.attrs
    if context["type"] not in ("matmul", "einsum") or context.op_type == "DynamicQuantizeMatMul":
        return None
    if "equation" in attrs:
        ranks = [len(value.shape) for value in inputs]
        return contraction_of_equation(attrs["equation"], range(len(ranks)), ranks)
    places = (0, 3) if context.op_type == "QLinearMatMul" else (0, 1)
    shapes: list[Any] = [inputs[place].shape for place in places]
    turned = bool(attrs.get("transA")), bool(attrs.get("transB"))
    return contraction_of_matmul(places, shapes, turned)
