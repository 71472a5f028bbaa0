"""PyTorch's operator types as the common operator types of `amanda_core.interface.vocabulary`.

Owns the translation and the keys it sets on contexts: ``type``, ``backward_type``, ``input_roles``,
``layout`` and ``weight_layout``. Does not import torch, since the types are names.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from amanda_core.driver_kit import OpContext
from amanda_core.interface import OP_TYPES as COMMON_TYPES, backward_type_of

__all__ = [
    "BACKWARD_TYPES",
    "COMMUNICATING",
    "FUSED",
    "LAYOUTS",
    "OF_GRADIENTS",
    "OP_TYPES",
    "ROLES",
    "WEIGHT_LAYOUTS",
    "describe",
]

#: Operators of the fused inference path, which modules take if their operators are not needed.
FUSED = frozenset({"_native_multi_head_attention", "_transformer_encoder_layer_fwd"})

K = TypeVar("K")

# Common type -> PyTorch's other names for it. ATen's internal names are listed since autograd names
# its nodes after them (`_safe_softmax`: SafeSoftmaxBackward0), and those of torch.nn.functional for
# tensor subclasses, which override the Python function itself.
_SYNONYMS = {
    "matmul": "mm bmm addmm addbmm baddbmm mv addmv dot vdot inner chain_matmul "
    "linalg_matmul linalg_multi_dot linalg_vecdot",
    "grouped_matmul": "_grouped_mm",
    "einsum": "tensordot",
    "outer": "ger",
    "bilinear": "_trilinear",
    "inverse": "linalg_inv linalg_inv_ex",
    "solve": "linalg_solve linalg_solve_ex linalg_solve_triangular triangular_solve cholesky_solve",
    "det": "linalg_det",
    "cholesky": "linalg_cholesky linalg_cholesky_ex",
    "qr": "linalg_qr",
    "svd": "linalg_svd",
    "eigh": "linalg_eigh",
    "fft": "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 "
    "fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn _fft_c2c _fft_r2c _fft_c2r",
    "unfold": "im2col",
    "fold": "col2im",
    "rnn": "rnn_tanh rnn_relu rnn_tanh_cell rnn_relu_cell",
    "lstm": "lstm_cell",
    "gru": "gru_cell",
    "attention": "scaled_dot_product_attention",
    "batch_norm": "native_batch_norm",
    "layer_norm": "native_layer_norm",
    "group_norm": "native_group_norm",
    "rms_norm": "_fused_rms_norm",
    "weight_norm": "_weight_norm _weight_norm_interface",
    "dropout": "feature_dropout alpha_dropout feature_alpha_dropout native_dropout dropout1d "
    "dropout2d dropout3d",
    "prelu": "_prelu_kernel",
    "rrelu": "rrelu_with_noise",
    "log_sigmoid": "logsigmoid",
    "softmax": "_softmax _safe_softmax",
    "log_softmax": "_log_softmax",
    "max_pool1d": "max_pool1d_with_indices",
    "max_pool2d": "max_pool2d_with_indices",
    "max_pool3d": "max_pool3d_with_indices",
    "sub": "subtract rsub",
    "mul": "multiply",
    "div": "divide true_divide",
    "floor_div": "floor_divide",
    "mod": "remainder fmod",
    "neg": "negative",
    "abs": "absolute",
    "sign": "sgn",
    "asin": "arcsin",
    "acos": "arccos",
    "atan": "arctan",
    "atan2": "arctan2",
    "trunc": "fix",
    "clip": "clamp clamp_min clamp_max",
    "maximum": "fmax",
    "minimum": "fmin",
    "conj": "_conj conj_physical",
    "equal": "eq",
    "not_equal": "ne",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "bitwise_and": "__and__",
    "bitwise_or": "__or__",
    "bitwise_xor": "__xor__",
    "var": "var_mean",
    "std": "std_mean",
    "max": "amax",
    "min": "amin",
    "norm": "linalg_norm linalg_vector_norm linalg_matrix_norm",
    "histogram": "histc bincount",
    "unique": "_unique2 unique_dim unique_consecutive",
    "reshape": "view flatten unflatten ravel view_as reshape_as _unsafe_view _reshape_alias",
    "transpose": "t permute swapaxes swapdims movedim moveaxis adjoint T mT H mH",
    "concat": "cat concatenate hstack vstack dstack",
    "split": "chunk unbind split_with_sizes tensor_split hsplit vsplit dsplit unsafe_split "
    "unsafe_chunk unsafe_split_with_sizes",
    "slice": "__getitem__ index select narrow index_select take masked_select",
    "assign_slice": "__setitem__ index_put",
    "assign": "copy",
    "gather": "take_along_dim",
    "scatter": "scatter_add scatter_reduce masked_scatter index_add index_copy index_fill put "
    "slice_scatter select_scatter diagonal_scatter as_strided_scatter fill_diagonal",
    "expand": "expand_as broadcast_to broadcast_tensors",
    "repeat": "repeat_interleave",
    "tile": "repeat",
    "diag": "diagonal diag_embed linalg_diagonal",
    "pad": "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d "
    "replication_pad1d replication_pad2d replication_pad3d",
    "cast": "to type float double half bfloat16 int long short char byte bool type_as _to_copy "
    "cfloat cdouble cpu cuda",
    "bitcast": "view_as_complex view_as_real",
    # A distributed tensor of its part, and the part of the tensor; a tensor that was waited for.
    "identity": "clone contiguous detach alias positive _FromTorchTensor _ToTorchTensor "
    "_c10d_functional::wait_tensor _c10d_functional::_wrap_tensor_autograd",
    "upsample": "interpolate upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    "grid_sample": "grid_sampler grid_sampler_2d grid_sampler_3d",
    "affine_grid": "affine_grid_generator",
    "depth_to_space": "pixel_shuffle",
    "space_to_depth": "pixel_unshuffle",
    "constant": "tensor as_tensor asarray new_tensor from_numpy frombuffer scalar_tensor",
    "full": "zeros ones full_like zeros_like ones_like new_full new_zeros new_ones fill zero",
    "empty": "empty_like new_empty empty_strided new_empty_strided empty_permuted new resize "
    "resize_as",
    "range": "arange linspace logspace",
    "random": "rand rand_like randn randn_like randint randint_like randperm normal uniform "
    "bernoulli multinomial exponential log_normal cauchy geometric poisson",
    "quantize": "quantize_per_tensor quantize_per_channel",
    "fake_quantize": "fake_quantize_per_tensor_affine fake_quantize_per_channel_affine "
    "fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask",
    "cross_entropy": "cross_entropy_loss",
    "nll_loss": "nll_loss_nd nll_loss2d",
}
# Common type -> functions of `torch.distributed`, and after a bar the functional collectives, which
# do the same without writing their arguments. They have no nodes of their own kind.
_COLLECTIVES = {
    "all_reduce": "all_reduce all_reduce_coalesced | all_reduce all_reduce_coalesced",
    "all_gather": "all_gather all_gather_coalesced all_gather_into_tensor "
    "all_gather_into_tensor_coalesced | all_gather_into_tensor all_gather_into_tensor_coalesced "
    "all_gather_into_tensor_out",
    "reduce_scatter": "reduce_scatter reduce_scatter_tensor reduce_scatter_tensor_coalesced | "
    "reduce_scatter_tensor reduce_scatter_tensor_coalesced reduce_scatter_tensor_out",
    "broadcast": "broadcast | broadcast",
    "all_to_all": "all_to_all all_to_all_single | all_to_all_single",
    "send": "send | isend",
    "recv": "recv | irecv",
    "barrier": "barrier monitored_barrier |",
}
#: What the types begin with of operators that communicate and are not functions of
#: `torch.distributed`.
COMMUNICATING = ("_c10d_functional", "Redistribute", "c10d::")
#: Types of backward ops that have the gradient of a leaf, before and after it is reduced.
OF_GRADIENTS = ("AccumulateGrad", "ReduceGrad")
_COLLECTIVE_NAMES = {
    f"{library}::{name}": common_type
    for common_type, both in _COLLECTIVES.items()
    for libraries, names in zip(
        (("c10d",), ("_c10d_functional", "_c10d_functional_autograd")), both.split("|"), strict=True
    )
    for library in libraries
    for name in names.split()
}
# Common types that are not names of PyTorch operators, or have another meaning there.
_NOT_NAMES = frozenset(
    {"accumulate_grad", "assign", "assign_slice", "attention", "bitcast", "cast", "constant"}
    | {"depth_to_space", "eigh", "equal", "fake_quantize", "fft", "floor_div", "grouped_matmul"}
    | _COLLECTIVES.keys()
    | {"identity", "mod", "quantize", "reduce_grad", "rnn", "solve", "space_to_depth"}
    | {"weight_norm"}
)


def _by_name(table: Mapping[K, str]) -> dict[str, K]:
    return {name: key for key, names in table.items() for name in names.split()}


#: Operator type of this driver -> common type, which in-place variants share.
OP_TYPES: Mapping[str, str] = MappingProxyType(
    {common_type: common_type for common_type in COMMON_TYPES if common_type not in _NOT_NAMES}
    | _by_name(_SYNONYMS)
    | _COLLECTIVE_NAMES
)


def _node_kind(name: str) -> str:
    """Return the name of an ATen operator's autograd node: `_fft_c2c` -> ``FftC2CBackward``."""
    return "".join(part.title() for part in name.split("_")) + "Backward"


#: Kind of autograd node, without its number -> common operator type.
BACKWARD_TYPES: Mapping[str, str] = MappingProxyType(
    {
        _node_kind(name): backward_type_of(common_type)
        for name, common_type in OP_TYPES.items()
        if "::" not in name
    }
    | {
        # That of a linear layer by default; for `torch.addmm` it is a matmul, see _OWN_NODES.
        "AddmmBackward": backward_type_of("linear"),
        "CopySlices": backward_type_of("assign_slice"),
        "CopyBackwards": backward_type_of("assign"),
        "AccumulateGrad": "accumulate_grad",
        "ReduceGrad": "reduce_grad",
    }
)

# Nodes of several operators, whose type is that of the forward op: convolutions of every rank
# (also transposed), recurrent layers, backend-specific versions.
_OF_FORWARD = ("Convolution", "Cudnn", "Miopen", "Mkldnn", "ScaledDotProduct", "SlowConv", "Thnn")

# Common type of a forward op -> nodes that compute its gradient proper under another op's name.
_OWN_NODES = {
    common_type: frozenset(f"{kind}Backward" for kind in kinds.split())
    for common_type, kinds in {
        "linear": "Addmm Mm Bmm Mv",
        "matmul": "Addmm Mm Bmm Mv",
        "einsum": "Mm Bmm",
        "outer": "Mul",
        "instance_norm": "NativeBatchNorm",
        "dropout": "Mul",
        "relu6": "Hardtanh",
        "selu": "Elu",
        "avg_pool1d": "AvgPool2D",
        "max_pool1d": "MaxPool2DWithIndices",
        "adaptive_avg_pool1d": "AdaptiveAvgPool2D Mean",
        "adaptive_avg_pool2d": "Mean",
        "adaptive_avg_pool3d": "Mean",
        "adaptive_max_pool1d": "AdaptiveMaxPool2D",
        "square": "Pow",
    }.items()
}

# Roles of the leading inputs -> the operators with these inputs.
ROLES: Mapping[str, tuple[str, ...]] = _by_name(
    {
        ("input", "weight", "bias"): "linear conv1d conv2d conv3d conv_transpose1d "
        "conv_transpose2d conv_transpose3d convolution batch_norm native_batch_norm instance_norm "
        "native_group_norm",
        ("input", "normalized_shape", "weight", "bias"): "layer_norm native_layer_norm",
        ("input", "num_groups", "weight", "bias"): "group_norm",
        ("input", "normalized_shape", "weight"): "rms_norm",
        ("input", "weight"): "prelu",
        ("left", "right", "weight", "bias"): "bilinear",
        ("left", "right"): "matmul mm bmm mv dot vdot inner sub subtract div divide true_divide "
        "pow floor_divide remainder fmod",
        ("right", "left"): "rsub",
        ("addend", "left", "right"): "addmm addbmm baddbmm addmv",
        ("query", "key", "value", "mask"): "scaled_dot_product_attention",
        ("weight", "indices"): "embedding",
        ("weight", "indices", "offsets"): "embedding_bag",
        ("input", "target"): "cross_entropy_loss nll_loss nll_loss_nd mse_loss l1_loss "
        "smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div",
    }
)
WEIGHT_LAYOUTS = {
    "linear": "OI",
    **{f"conv{d}d": f"OI{'DHW'[-d:]}" for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": f"IO{'DHW'[-d:]}" for d in (1, 2, 3)},
}
# For batches; PyTorch accepts a single image or volume without N, too.
LAYOUTS = {"1d": "NCW", "2d": "NCHW", "3d": "NCDHW"}
# Also matches nodes like `DiagonalBackward0_copy`.
_NUMBER = re.compile(r"(?<=Backward)\d+(_copy)?$")


def describe(context: OpContext, op_type: str) -> None:
    """Set the common keys of a context of an operator of this type."""
    if context.is_backward():
        context["backward_type"] = _backward_type(context)
        return
    name, common_type, _ = known = _known(op_type)
    if name in ("max", "min") and context.input_names[1:2] == ("other",):
        known = _known(op_type, f"{name}imum")
    elif name == "convolution":
        # ATen graphs use one operator for every rank: (input, weight, bias, stride, padding,
        # dilation, transposed, ...).
        inputs = context.get_inputs()
        common_type = f"conv{'_transpose' * bool(inputs[6])}{inputs[1].dim() - 2}d"
        known = _known(op_type, common_type)
    context.update(known[2])


@functools.cache
def _known(op_type: str, common_type: str | None = None) -> tuple[str, str | None, dict[str, Any]]:
    """Return an operator's name, for an in-place variant without its ``_``, its common type, and
    the keys of its contexts.
    """
    in_place = op_type not in OP_TYPES and op_type.endswith("_") and not op_type.endswith("__")
    name = op_type[:-1] if in_place else op_type
    common_type = common_type or OP_TYPES.get(name)
    keys: dict[str, Any] = {"type": common_type}
    if common_type is not None:
        for key, known, of in (
            ("input_roles", ROLES, name),
            ("weight_layout", WEIGHT_LAYOUTS, common_type),
            ("layout", LAYOUTS, common_type[-2:]),
        ):
            if of in known:
                keys[key] = known[of]
    return name, common_type, keys


def _backward_type(context: OpContext) -> str | None:
    kind = _NUMBER.sub("", context.op_type.rpartition("::")[2])
    common_type = context.forward["type"] if context.forward is not None else None
    if not isinstance(common_type, str) or common_type not in COMMON_TYPES:
        # A tool may have set a type of its own.
        common_type = None if context.forward is None else _known(context.forward.op_type)[1]
    if common_type is not None and (
        kind.startswith(_OF_FORWARD) or kind in _OWN_NODES.get(common_type, ())
    ):
        return backward_type_of(common_type)
    return BACKWARD_TYPES.get(kind)
