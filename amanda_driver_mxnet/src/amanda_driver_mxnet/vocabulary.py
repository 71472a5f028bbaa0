"""MXNet's operators as the common operator types, with roles of inputs and layouts.

Owns the translation and the keys that it sets on contexts. Does not import MXNet, since the types
are names. An attribute tells which activation, pooling or recurrence it is; attributes are Python
objects in imperative programs, and texts in hybridized ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from amanda_core import OpContext
from amanda_core.vocabulary import OP_TYPES as COMMON_TYPES
from amanda_core.vocabulary import backward_type_of

__all__ = ["OP_TYPES", "describe"]

# MXNet has several operators for one computation: for arrays and scalars, broadcast or not, and
# those of NumPy's interface. Without prefix and suffix most of their names are common types.
_AFFIXES = re.compile(
    r"^(_npi_|_npx_|_np_|_contrib_|_linalg_|_random_|_scatter_|broadcast_|elemwise_|_)?"
    r"(.+?)(_v[12]|_[lr]?scalar2?|_n)?$"
)
_NAMES = """
linear FullyConnected; matmul dot batch_dot gemm gemm2; einsum tensordot tensordot_int_axes;
solve trsm; cholesky potrf; eigh syevd; fft ifft; unfold im2col; fold col2im;
embedding Embedding SparseEmbedding; batch_norm BatchNorm SyncBatchNorm; layer_norm LayerNorm;
group_norm GroupNorm; instance_norm InstanceNorm; dropout Dropout; hardsigmoid hard_sigmoid;
softmax SoftmaxActivation; adaptive_avg_pool2d AdaptiveAvgPooling2D; add plus grad_add add_n;
sub minus rminus subtract rsubtract; mul multiply; div rdiv true_divide rtrue_divide; mod rmod;
neg negative; abs absolute; pow power rpower; asin arcsin; acos arccos; atan arctan;
atan2 arctan2 rarctan2; round rint around; trunc fix; less lesser; less_equal lesser_equal;
sum nansum; mean average; prod nanprod; var moments; argmax argmax_channel; histogram bincount;
reshape Reshape Flatten reshape_like; transpose SwapAxis moveaxis; split SliceChannel hsplit dsplit;
concat Concat concatenate hstack vstack dstack rnn_param_concat; assign copyto set_value;
slice slice_axis slice_like at boolean_mask gather_nd take; gather pick batch_take;
assign_slice slice_assign boolean_mask_assign boolean_mask_assign_tensor; scatter scatter_nd set_nd;
expand to axis like; unsqueeze expand_dims; flip reverse; diag diagonal; pad Pad;
cast Cast amp_cast CrossDeviceCopy; identity copy BlockGrad identity_with_attr_like_rhs;
upsample UpSampling BilinearResize2D; grid_sample BilinearSampler; one_hot onehot_encode;
full ones zeros ones_like zeros_like full_like; range arange linspace arange_like logspace;
random uniform normal exponential poisson randint bernoulli choice multinomial;
cross_entropy softmax_cross_entropy SoftmaxOutput; smooth_l1_loss smooth_l1; ctc_loss CTCLoss
"""
_BY_BASE = {name: names.split()[0] for names in _NAMES.split(";") for name in names.split()[1:]}
_EXACT = {"_npi_identity": "eye", "_npi_broadcast_to": "expand", "_scatter_elemwise_div": "div"}


class _Types(dict[str, str]):
    """Operator -> common type, found at the first use."""

    def __missing__(self, name: str) -> str:
        matched = _AFFIXES.match(name)
        base = matched.group(2) if matched is not None else name
        found = _BY_BASE.get(base, base)
        if found not in COMMON_TYPES:
            raise KeyError(name)
        return self.setdefault(name, found)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


#: Operator -> common type. `describe` finds the types of operators that an attribute tells apart.
OP_TYPES: Mapping[str, str] = _Types({**_BY_BASE, **_EXACT})

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
_LAYER = ("input", "weight", "bias")
_ROLES = {
    **dict.fromkeys(["linear", "layer_norm", "group_norm", "instance_norm", "prelu"], _LAYER),
    **{f"{name}{rank}d": _LAYER for rank in _SPACE for name in ("conv", "conv_transpose")},
    **dict.fromkeys(["matmul", "sub", "div", "pow", "mod"], ("left", "right")),
    **dict.fromkeys(["cross_entropy", "ctc_loss"], ("input", "target")),
    **dict.fromkeys(["take", "gather_nd", "gather"], ("input", "indices")),
    "batch_norm": (*_LAYER, "mean", "variance"),
    "embedding": ("indices", "weight"),
}


def describe(context: OpContext) -> None:
    """Set the common keys of a context."""
    if context.namespace.endswith("/hybrid"):
        context["not_compiled"] = True
    if context.is_backward():
        common_type = context.forward["type"] if context.forward is not None else None
        context["backward_type"] = None if common_type is None else backward_type_of(common_type)
        return
    attrs = {name: str(value) for name, value in context.attrs.items()}
    common_type = context["type"] = _type(context.op_type, attrs)
    if common_type is None:
        return
    inputs: Sequence[Any] = context.get_inputs() or ()
    roles = _ROLES.get(context.op_type) or _ROLES.get(common_type)
    if roles is not None and len(inputs) > 1:
        context["input_roles"] = roles
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
    return OP_TYPES.get(name)
