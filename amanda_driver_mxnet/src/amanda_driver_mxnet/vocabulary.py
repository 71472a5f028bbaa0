"""MXNet's operators as the common operator types, with roles of inputs and layouts.

Owns what ``driver.toml`` cannot tell: types by attributes, and layouts. Does not import MXNet,
since the types are names. An attribute tells which activation, pooling or recurrence it is;
attributes are Python objects in imperative programs, and texts in hybridized ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from amanda_core.driver_kit import Declarations, OpContext

__all__ = ["DECLARATIONS", "describe"]

_AFFIXES = re.compile(
    r"^(_npi_|_npx_|_np_|_contrib_|_linalg_|_random_|_scatter_|broadcast_|elemwise_|_)?"
    r"(.+?)(_v[12]|_[lr]?scalar2?|_n)?$"
)


def _plain(name: str) -> str:
    """Return the name of an operator without the prefix and suffix that do not matter."""
    matched = _AFFIXES.match(name)
    return name if matched is None else matched.group(2)


#: Also the vocabulary; `describe` finds the types of operators that an attribute tells apart.
DECLARATIONS = Declarations(__package__, _plain)

#: Operator -> the attribute that tells its common type, and its value -> common type.
_BY_ATTRIBUTE: Mapping[str, tuple[str, Mapping[str, str | None]]] = {
    "Activation": ("act_type", {"softrelu": "softplus", "softsign": None}),
    "LeakyReLU": ("act_type", {"leaky": "leaky_relu", "": "leaky_relu"}),
    "RNN": ("mode", {"rnn_relu": "rnn", "rnn_tanh": "rnn"}),
}
_RANKED = {
    "Convolution": "conv{}d",
    "Convolution_v1": "conv{}d",
    "Deconvolution": "conv_transpose{}d",
}
_POOLS = {"max": "max_pool{}d", "avg": "avg_pool{}d", "": "max_pool{}d"}
_SPACE = {1: "W", 2: "HW", 3: "DHW"}


def describe(context: OpContext) -> None:
    """Set the common keys of a context."""
    if context.is_forward() and context.namespace.endswith("/hybrid"):
        context["not_compiled"] = True
    attrs = {name: str(value) for name, value in context.attrs.items()}
    common_type = DECLARATIONS.describe(context, _type(context.op_type, attrs))
    if common_type is None:
        return
    inputs: Sequence[Any] = context.get_inputs() or ()
    rank = int(common_type[-2]) if common_type[-2:] in ("1d", "2d", "3d") else 0
    if rank:
        given = attrs.get("layout", "None")
        layout = f"NC{_SPACE[rank]}" if given == "None" else given
        context["layout"] = layout
        if common_type.startswith("conv"):
            channels = "IO" if "transpose" in common_type else "OI"
            context["weight_layout"] = layout.replace("N", channels[0]).replace("C", channels[1])
    elif common_type == "linear":
        context["weight_layout"] = "OI"
    elif common_type == "matmul" and len(inputs) > 1 and len(inputs[1].shape or ()) == 2:
        context["weight_layout"] = "OI" if attrs.get("transpose_b") == "True" else "IO"


def _type(name: str, attrs: Mapping[str, str]) -> str | None:
    """Return the common type of an operator with these attributes."""
    if name in _BY_ATTRIBUTE:
        attribute, types = _BY_ATTRIBUTE[name]
        value = attrs.get(attribute, "")
        return types.get(value, value)
    if name in _RANKED or name == "Pooling":
        # (3, 3), or (0, 0) for a pooling over everything.
        rank = len(re.findall(r"\d+", attrs.get("kernel", "()")))
        pattern = _RANKED.get(name) or _POOLS.get(attrs.get("pool_type", ""))
        if name == "Pooling" and attrs.get("global_pool") in ("True", "1"):
            pattern = "adaptive_" + pattern if pattern else None
        return pattern.format(rank) if pattern and rank in _SPACE else None
    return DECLARATIONS.get(name)
