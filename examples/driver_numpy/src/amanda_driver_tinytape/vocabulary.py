"""Common operator types of tinytape's operators."""

from __future__ import annotations

from amanda_core import OpContext

__all__ = ["OP_TYPES", "describe"]

#: Operator -> common type, which tools read as ``context["type"]``.
OP_TYPES = {
    "add": "add",
    "mul": "mul",
    "matmul": "matmul",
    "relu": "relu",
    "exp": "exp",
    "tanh": "tanh",
    "total": "sum",
}


def describe(context: OpContext) -> None:
    """Add the common types to the context of an op or backward op."""
    if context.is_forward():
        context["type"] = OP_TYPES.get(context.op_type)
        if context.op_type == "matmul":
            context["input_roles"] = ("left", "right")
    else:
        common_type = OP_TYPES.get(context.op_type.removesuffix("_pull"))
        context["backward_type"] = f"{common_type}_backward" if common_type is not None else None
