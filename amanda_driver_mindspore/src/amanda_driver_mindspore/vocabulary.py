"""MindSpore's operators as the common operator types, with roles of inputs and layouts.

Owns what ``driver.toml`` cannot tell: types by the ranks of weights, layouts, and which operators
change operands in place. Does not import MindSpore, since the types are names.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

from amanda_core.driver_kit import Declarations, OpContext
from amanda_core.interface import OP_TYPES

__all__ = ["DECLARATIONS", "describe", "is_quiet", "written"]

#: Endings of names that do not matter: variants for views, scalars and newer interfaces.
_ENDINGS = re.compile(r"(Ext|View|Functional|Tensor|Scalar|V\d|DynamicShape)+$")
_COMMON = {name.replace("_", ""): name for name in OP_TYPES}


def _plain(name: str) -> str:
    """Return the name of an operator without what does not matter, or a common type."""
    is_method = name.strip("_").islower()
    bare = name.strip("_").removeprefix("Inplace")
    if is_method and name.startswith("__i") and name not in ("__invert__", "__index__"):
        bare = bare[1:]
    bare = (_ENDINGS.sub("", bare) or bare).lower().replace("_", "")
    return _COMMON.get(bare, bare)


DECLARATIONS = Declarations(__package__, _plain)

_QUIET = frozenset(DECLARATIONS.names["quiet"])
_WRITING = frozenset(DECLARATIONS.names["writing"])
_PREFIXES = DECLARATIONS.names["writing_prefixes"]
_SPACE = {1: "W", 2: "HW", 3: "DHW"}


def is_quiet(op_type: str) -> bool:
    """Return True for what MindSpore calls like an operator, but does not compute with tensors."""
    return op_type in _QUIET


@functools.cache
def written(op_type: str, count: int) -> Sequence[int]:
    """Return the positions of the values that an operator changes in place.

    Args:
        op_type: MindSpore's name of the operator.
        count: How many arguments it gets.
    """
    if op_type in ("BatchNorm", "BatchNormExt"):
        return range(3, min(5, count))
    is_method = op_type.islower()
    in_place = is_method and op_type.endswith("_") and not op_type.endswith("__")
    in_place = in_place or (
        op_type.startswith("__i") and op_type not in ("__invert__", "__index__")
    )
    is_writing = in_place or op_type in _WRITING or op_type.startswith(_PREFIXES)
    if op_type.startswith(("Apply", "Fused", "SparseApply")):
        return range(count)
    return range(1) if is_writing else range(0)


def describe(context: OpContext) -> None:
    """Set the common keys of a context."""
    inputs: Sequence[Any] = context.get_inputs() or ()
    common_type = DECLARATIONS.describe(context, _type(context.op_type, inputs))
    if common_type is None:
        return
    rank = int(common_type[-2]) if common_type[-2:] in ("1d", "2d", "3d") else 0
    if rank:
        given = context.attrs.get("data_format", context.attrs.get("format"))
        layout = (
            given if given in (f"NC{_SPACE[rank]}", f"N{_SPACE[rank]}C") else f"NC{_SPACE[rank]}"
        )
        context["layout"] = layout
        if common_type.startswith("conv"):
            channels = "IO" if "transpose" in common_type else "OI"
            context["weight_layout"] = layout.replace("N", channels[0]).replace("C", channels[1])
    elif common_type == "embedding" and context.op_type.startswith("Gather"):
        context["input_roles"] = ("weight", "indices")
    elif common_type == "linear":
        context["weight_layout"] = "OI"
    elif common_type == "matmul" and len(getattr(inputs[-1:] and inputs[1], "shape", ())) == 2:
        is_turned = context.op_type in ("MatMul", "BatchMatMul") and inputs[3:4] == [True]
        context["weight_layout"] = "OI" if is_turned else "IO"


def _type(name: str, inputs: Sequence[Any]) -> str | None:
    """Return the common type of an operator with these inputs."""
    plain = _plain(name)
    if plain in ("convolution", "convolutionstr") and len(inputs) > 1:
        rank = len(inputs[1].shape) - 2
        turned = any(one is True for one in inputs[6:8])
        return f"{'conv_transpose' if turned else 'conv'}{rank}d" if rank in _SPACE else None
    if plain == "gather" and name not in ("GatherD", "gather"):
        # MindSpore's own Gather takes rows of one axis; `nn.Embedding` takes those of its table.
        is_table = inputs and type(inputs[0]).__name__ == "Parameter" and 0 in inputs[2:3]
        return "embedding" if is_table else "slice"
    return DECLARATIONS.get(name)
