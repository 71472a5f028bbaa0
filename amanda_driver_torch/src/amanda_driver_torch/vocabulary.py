"""PyTorch's operator types in the common words of `amanda_core.vocabulary`.

Owns the translation and what it puts into contexts: ``type``, ``backward_type``, ``input_roles``,
``layout`` and ``weight_layout``. Imports no torch: the words are names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from amanda_core import OpContext
from amanda_core.vocabulary import OP_TYPES as WORDS
from amanda_core.vocabulary import backward_word

__all__ = ["BACKWARD_TYPES", "OP_TYPES", "describe"]

_SYNONYMS = {
    "matmul": "mm bmm addmm addbmm baddbmm mv addmv dot vdot inner chain_matmul multi_dot",
    "rnn": "rnn_tanh rnn_relu rnn_tanh_cell rnn_relu_cell",
    "lstm": "lstm_cell",
    "gru": "gru_cell",
    "attention": "scaled_dot_product_attention",
    "embedding": "embedding_bag",
    "dropout": "feature_dropout alpha_dropout feature_alpha_dropout dropout2d native_dropout",
    "softmax": "_softmax",
    "log_softmax": "_log_softmax",
    "hardtanh": "",
    "sub": "subtract rsub",
    "mul": "multiply",
    "div": "divide true_divide",
    "neg": "negative",
    "abs": "absolute",
    "clip": "clamp clamp_min clamp_max",
    "concat": "cat concatenate hstack vstack dstack",
    "reshape": "view flatten unflatten ravel view_as reshape_as _unsafe_view",
    "transpose": "t permute swapaxes swapdims movedim moveaxis T mT adjoint",
    "split": "chunk unbind tensor_split hsplit vsplit dsplit split_with_sizes",
    "slice": "__getitem__ select narrow index_select",
    "assign_slice": "__setitem__ index_put",
    "scatter": "scatter_add scatter_reduce",
    "gather": "take_along_dim",
    "expand": "expand_as broadcast_to repeat tile",
    "cast": "to type float double half bfloat16 int long short bool type_as",
    "identity": "clone contiguous detach alias",
    "pad": "constant_pad_nd reflection_pad2d replication_pad2d",
    "upsample": "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d upsample_nearest1d "
    "upsample_linear1d upsample_nearest3d upsample_trilinear3d",
    "norm": "linalg_vector_norm linalg_norm linalg_matrix_norm",
    "max": "amax",
    "min": "amin",
    "cross_entropy": "cross_entropy_loss",
    "nll_loss": "nll_loss_nd nll_loss2d",
    "max_pool1d": "max_pool1d_with_indices",
    "max_pool2d": "max_pool2d_with_indices",
    "max_pool3d": "max_pool3d_with_indices",
    "gelu": "",
    "batch_norm": "native_batch_norm",
    "layer_norm": "native_layer_norm",
    "group_norm": "native_group_norm",
}


def _with_synonyms() -> dict[str, str]:
    types = {word: word for word in WORDS if word not in ("accumulate_grad", "concat")}
    for word, names in _SYNONYMS.items():
        types.update((name, word) for name in names.split())
    return types


#: Operator type as the driver names it -> common word. In-place variants go by the same word.
OP_TYPES: Mapping[str, str] = MappingProxyType(_with_synonyms())

#: Kind of autograd node, without ``Backward`` and number -> common word of the forward type.
BACKWARD_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "Addmm": "linear",
        "Mm": "matmul",
        "Bmm": "matmul",
        "Mv": "matmul",
        "Dot": "matmul",
        "NativeBatchNorm": "batch_norm",
        "NativeLayerNorm": "layer_norm",
        "NativeGroupNorm": "group_norm",
        "Relu": "relu",
        "LeakyRelu": "leaky_relu",
        "Gelu": "gelu",
        "Silu": "silu",
        "Elu": "elu",
        "Hardtanh": "hardtanh",
        "Hardswish": "hardswish",
        "Hardsigmoid": "hardsigmoid",
        "Sigmoid": "sigmoid",
        "Softplus": "softplus",
        "Tanh": "tanh",
        "Softmax": "softmax",
        "LogSoftmax": "log_softmax",
        "Embedding": "embedding",
        "EmbeddingBag": "embedding",
        "MaxPool2DWithIndices": "max_pool2d",
        "MaxPool3DWithIndices": "max_pool3d",
        "AvgPool2D": "avg_pool2d",
        "AvgPool3D": "avg_pool3d",
        "AdaptiveAvgPool2D": "adaptive_avg_pool2d",
        "Add": "add",
        "Sub": "sub",
        "Mul": "mul",
        "Div": "div",
        "Neg": "neg",
        "Pow": "pow",
        "Exp": "exp",
        "Log": "log",
        "Sqrt": "sqrt",
        "Rsqrt": "rsqrt",
        "Abs": "abs",
        "Clamp": "clip",
        "Where": "where",
        "Erf": "erf",
        "Sum": "sum",
        "Mean": "mean",
        "Max": "max",
        "Min": "min",
        "Cat": "concat",
        "Stack": "stack",
        "Split": "split",
        "Unbind": "split",
        "View": "reshape",
        "UnsafeView": "reshape",
        "ReshapeAlias": "reshape",
        "T": "transpose",
        "Transpose": "transpose",
        "Permute": "transpose",
        "Slice": "slice",
        "Select": "slice",
        "Index": "slice",
        "IndexSelect": "slice",
        "CopySlices": "assign_slice",
        "Gather": "gather",
        "Scatter": "scatter",
        "Expand": "expand",
        "Squeeze": "squeeze",
        "Unsqueeze": "unsqueeze",
        "ToCopy": "cast",
        "Clone": "identity",
        "NllLoss": "nll_loss",
        "MseLoss": "mse_loss",
        "AccumulateGrad": "accumulate_grad",
    }
)

# One node of PyTorch serves convolutions of every rank, transposed ones too; so does attention's.
_OF_FORWARD = ("Convolution", "ScaledDotProduct", "SlowConv", "Mkldnn", "Cudnn", "Thnn")

_ROLES = {
    "linear": ("input", "weight", "bias"),
    "conv": ("input", "weight", "bias"),
    "embedding": ("weight", "indices"),
}
_WEIGHT_LAYOUTS = {
    "linear": "OI",
    "conv1d": "OIW",
    "conv2d": "OIHW",
    "conv3d": "OIDHW",
    "conv_transpose1d": "IOW",
    "conv_transpose2d": "IOHW",
    "conv_transpose3d": "IODHW",
}
_LAYOUTS = {"1d": "NCW", "2d": "NCHW", "3d": "NCDHW"}
_NUMBER = re.compile(r"Backward\d*$")


def describe(context: OpContext) -> None:
    """Set the common keys of a context."""
    if context.is_backward():
        context["backward_type"] = _backward_type(context)
        return
    name = context.op_type
    word = OP_TYPES.get(name)
    if word is None and name.endswith("_") and not name.endswith("__"):
        word = OP_TYPES.get(name[:-1])
    context["type"] = word
    if word is None:
        return
    roles = _ROLES.get("conv" if word.startswith("conv") and word != "concat" else word)
    if roles is not None:
        context["input_roles"] = roles
    if word in _WEIGHT_LAYOUTS:
        context["weight_layout"] = _WEIGHT_LAYOUTS[word]
    if word[-2:] in _LAYOUTS:
        context["layout"] = _LAYOUTS[word[-2:]]


def _backward_type(context: OpContext) -> str | None:
    kind = _NUMBER.sub("", context.op_type)
    if kind == "AccumulateGrad":
        return "accumulate_grad"
    if kind.startswith(_OF_FORWARD):
        forward = context.forward
        word = forward["type"] if forward is not None else None
    else:
        word = BACKWARD_TYPES.get(kind)
    return backward_word(word) if word is not None else None
