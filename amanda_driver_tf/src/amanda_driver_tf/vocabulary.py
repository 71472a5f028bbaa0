"""TensorFlow's operator types as the common operator types of `amanda_core.interface.vocabulary`.

Owns the translation and the keys it sets on contexts: ``type``, ``backward_type``, ``input_roles``,
``layout`` and ``weight_layout``. Does not import TensorFlow, since the types are names. Types
without a common type, and the reasons, are listed in `tests/operators_without_words.txt`. Most of
this long module is tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from amanda_core.driver_kit import OpContext
from amanda_core.interface import OP_TYPES as COMMON_TYPES, backward_type_of

__all__ = ["BACKWARD_TYPES", "LAYOUTS", "OP_TYPES", "ROLES", "WEIGHT_LAYOUTS", "describe"]

# Common type -> TensorFlow's op types. A Keras layer often runs several of them: Dense runs a
# matmul and an add, Conv1D an unsqueeze, a conv2d and a squeeze.
_NAMES = {
    "matmul": "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 SparseMatMul SparseTensorDenseMatMul "
    "SparseMatrixMatMul SparseMatrixSparseMatMul TridiagonalMatMul",
    "einsum": "Einsum XlaEinsum XlaDot XlaDotV2",
    "inverse": "MatrixInverse BatchMatrixInverse",
    "solve": "MatrixSolve BatchMatrixSolve MatrixTriangularSolve BatchMatrixTriangularSolve "
    "BandedTriangularSolve TridiagonalSolve",
    "det": "MatrixDeterminant BatchMatrixDeterminant",
    "cholesky": "Cholesky BatchCholesky SparseMatrixSparseCholesky",
    "qr": "Qr",
    "svd": "Svd BatchSvd XlaSvd",
    "eigh": "SelfAdjointEig SelfAdjointEigV2 BatchSelfAdjointEig BatchSelfAdjointEigV2 "
    "XlaSelfAdjointEig",
    "fft": "FFT FFT2D FFT3D FFTND IFFT IFFT2D IFFT3D IFFTND RFFT RFFT2D RFFT3D RFFTND "
    "IRFFT IRFFT2D IRFFT3D IRFFTND BatchFFT BatchFFT2D BatchFFT3D BatchIFFT BatchIFFT2D "
    "BatchIFFT3D",
    # `Conv` is used for every rank; see `_type`.
    "conv2d": "Conv2D DepthwiseConv2dNative FusedPadConv2D FusedResizeAndPadConv2D",
    "conv3d": "Conv3D",
    # In a forward program these are layers; for the backward program see `BACKWARD_TYPES`.
    "conv_transpose2d": "Conv2DBackpropInput Conv2DBackpropInputV2 "
    "DepthwiseConv2dNativeBackpropInput",
    "conv_transpose3d": "Conv3DBackpropInput Conv3DBackpropInputV2",
    "unfold": "ExtractImagePatches ExtractVolumePatches",
    # An attribute of `CudnnRNN` tells which of several it is; see `_type`.
    "lstm": "BlockLSTM BlockLSTMV2 LSTMBlockCell",
    "gru": "GRUBlockCell",
    # `Gather` and `GatherV2` are embeddings, too, if they take rows of a table; see `_type`.
    "embedding": "ResourceGather",
    "embedding_bag": "SparseSegmentSum SparseSegmentSumWithNumSegments SparseSegmentMean "
    "SparseSegmentMeanWithNumSegments",
    "batch_norm": "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 "
    "BatchNormWithGlobalNormalization",
    "relu": "Relu",
    "relu6": "Relu6",
    "leaky_relu": "LeakyRelu",
    "elu": "Elu",
    "selu": "Selu",
    "sigmoid": "Sigmoid",
    "softplus": "Softplus",
    "softmax": "Softmax",
    "log_softmax": "LogSoftmax",
    "tanh": "Tanh",
    "max_pool2d": "MaxPool MaxPoolV2 MaxPoolWithArgmax",
    "max_pool3d": "MaxPool3D",
    "avg_pool2d": "AvgPool",
    "avg_pool3d": "AvgPool3D",
    # Updates of variables have the same type, like in-place operators of other frameworks.
    "add": "Add AddV2 AddN AccumulateNV2 BiasAdd BiasAddV1 AssignAdd AssignAddVariableOp",
    "sub": "Sub AssignSub AssignSubVariableOp",
    "mul": "Mul MulNoNan",
    "div": "Div RealDiv DivNoNan Xdivy",
    "floor_div": "FloorDiv",
    "mod": "Mod FloorMod TruncateMod",
    "neg": "Neg",
    "abs": "Abs ComplexAbs",
    "sign": "Sign",
    "reciprocal": "Inv Reciprocal",
    "square": "Square",
    "pow": "Pow",
    "sqrt": "Sqrt",
    "rsqrt": "Rsqrt",
    "exp": "Exp",
    "expm1": "Expm1",
    "log": "Log",
    "log1p": "Log1p",
    "erf": "Erf",
    "erfc": "Erfc",
    "sin": "Sin",
    "cos": "Cos",
    "tan": "Tan",
    "asin": "Asin",
    "acos": "Acos",
    "atan": "Atan",
    "atan2": "Atan2",
    "sinh": "Sinh",
    "cosh": "Cosh",
    "floor": "Floor",
    "ceil": "Ceil",
    "round": "Round Rint",
    "clip": "ClipByValue",
    "maximum": "Maximum",
    "minimum": "Minimum",
    "complex": "Complex",
    "real": "Real",
    "imag": "Imag",
    "conj": "Conj",
    "where": "Select SelectV2",
    "equal": "Equal",
    "not_equal": "NotEqual",
    "less": "Less",
    "less_equal": "LessEqual",
    "greater": "Greater",
    "greater_equal": "GreaterEqual",
    "logical_and": "LogicalAnd",
    "logical_or": "LogicalOr",
    "logical_not": "LogicalNot",
    "bitwise_and": "BitwiseAnd",
    "bitwise_or": "BitwiseOr",
    "bitwise_xor": "BitwiseXor",
    "bitwise_not": "Invert",
    "isnan": "IsNan",
    "isinf": "IsInf",
    "isfinite": "IsFinite",
    "sum": "Sum",
    "mean": "Mean",
    "prod": "Prod",
    "max": "Max",
    "min": "Min",
    "argmax": "ArgMax",
    "argmin": "ArgMin",
    "any": "Any",
    "all": "All",
    "norm": "EuclideanNorm",
    "cumsum": "Cumsum",
    "cumprod": "Cumprod",
    "segment_reduce": "SegmentMax SegmentMaxV2 SegmentMean SegmentMin SegmentMinV2 SegmentProd "
    "SegmentProdV2 SegmentSum SegmentSumV2 UnsortedSegmentMax UnsortedSegmentMin "
    "UnsortedSegmentProd UnsortedSegmentSum",
    "topk": "TopK TopKV2 ApproxTopK",
    "sort": "XlaSort",
    "nonzero": "Where",
    "unique": "Unique UniqueV2 UniqueWithCounts UniqueWithCountsV2",
    "histogram": "Bincount DenseBincount HistogramFixedWidth",
    "reshape": "Reshape",
    "transpose": "Transpose ConjugateTranspose",
    "concat": "Concat ConcatV2 ParallelConcat",
    "stack": "Pack",
    "split": "Split SplitV Unpack",
    # `Gather` takes indices of any rank along one axis, unlike the common type "gather".
    "slice": "Slice StridedSlice Gather GatherV2 GatherNd ResourceGatherNd",
    "assign_slice": "StridedSliceAssign ResourceStridedSliceAssign TensorStridedSliceUpdate "
    "InplaceUpdate",
    "assign": "Assign AssignVariableOp",
    "scatter": "ScatterNd ScatterNdNonAliasingAdd TensorScatterAdd TensorScatterMax "
    "TensorScatterMin TensorScatterSub TensorScatterUpdate ScatterAdd ScatterDiv ScatterMax "
    "ScatterMin ScatterMul ScatterSub ScatterUpdate ScatterNdAdd ScatterNdMax ScatterNdMin "
    "ScatterNdSub ScatterNdUpdate ResourceScatterAdd ResourceScatterDiv ResourceScatterMax "
    "ResourceScatterMin ResourceScatterMul ResourceScatterSub ResourceScatterUpdate "
    "ResourceScatterNdAdd ResourceScatterNdMax ResourceScatterNdMin ResourceScatterNdSub "
    "ResourceScatterNdUpdate InplaceAdd InplaceSub",
    "expand": "BroadcastTo",
    "tile": "Tile",
    "squeeze": "Squeeze",
    "unsqueeze": "ExpandDims",
    "flip": "Reverse ReverseV2",
    "roll": "Roll",
    "diag": "Diag DiagPart MatrixDiag MatrixDiagV2 MatrixDiagV3 MatrixDiagPart MatrixDiagPartV2 "
    "MatrixDiagPartV3 BatchMatrixDiag BatchMatrixDiagPart",
    "pad": "Pad PadV2 MirrorPad",
    "cast": "Cast",
    "bitcast": "Bitcast",
    "identity": "Identity IdentityN RefIdentity Snapshot StopGradient PreventGradient EnsureShape "
    "CheckNumerics CheckNumericsV2 DeepCopy Copy CopyHost GuaranteeConst PlaceholderWithDefault "
    "DebugIdentity DebugIdentityV2 DebugIdentityV3 DebugGradientIdentity DebugGradientRefIdentity "
    "Print",
    "upsample": "ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor ScaleAndTranslate",
    "depth_to_space": "DepthToSpace",
    "space_to_depth": "SpaceToDepth",
    "one_hot": "OneHot",
    "constant": "Const HostConst ImmutableConst",
    "full": "Fill ZerosLike OnesLike",
    "empty": "Empty",
    "range": "Range LinSpace",
    "random": "RandomUniform RandomUniformInt RandomStandardNormal TruncatedNormal "
    "ParameterizedTruncatedNormal Multinomial RandomGamma RandomPoisson RandomPoissonV2 "
    "RandomShuffle NonDeterministicInts StatefulRandomBinomial StatefulStandardNormal "
    "StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform StatefulUniformFullInt "
    "StatefulUniformInt StatelessMultinomial StatelessParameterizedTruncatedNormal "
    "StatelessRandomBinomial StatelessRandomGammaV2 StatelessRandomGammaV3 StatelessRandomNormal "
    "StatelessRandomNormalV2 StatelessRandomPoisson StatelessRandomUniform "
    "StatelessRandomUniformV2 StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2 "
    "StatelessRandomUniformInt StatelessRandomUniformIntV2 StatelessShuffle "
    "StatelessTruncatedNormal StatelessTruncatedNormalV2",
    "quantize": "QuantizeV2 UniformQuantize",
    "dequantize": "Dequantize UniformDequantize",
    "fake_quantize": "FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars "
    "FakeQuantWithMinMaxVarsPerChannel QuantizeAndDequantize QuantizeAndDequantizeV2 "
    "QuantizeAndDequantizeV3 QuantizeAndDequantizeV4",
    "cross_entropy": "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits",
    "ctc_loss": "CTCLoss CTCLossV2",
}

# Common type of a forward op -> op types that only compute its gradient.
_GRADIENTS = {
    "conv2d": "Conv2DBackpropInput Conv2DBackpropInputV2 Conv2DBackpropFilter "
    "Conv2DBackpropFilterV2 DepthwiseConv2dNativeBackpropInput "
    "DepthwiseConv2dNativeBackpropFilter",
    "conv3d": "Conv3DBackpropInput Conv3DBackpropInputV2 Conv3DBackpropFilter "
    "Conv3DBackpropFilterV2",
    "lstm": "BlockLSTMGrad BlockLSTMGradV2 LSTMBlockCellGrad",
    "gru": "GRUBlockCellGrad",
    "embedding_bag": "SparseSegmentSumGrad SparseSegmentSumGradV2 SparseSegmentMeanGrad "
    "SparseSegmentMeanGradV2",
    "batch_norm": "FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3 "
    "BatchNormWithGlobalNormalizationGrad",
    "relu": "ReluGrad",
    "relu6": "Relu6Grad",
    "leaky_relu": "LeakyReluGrad",
    "elu": "EluGrad",
    "selu": "SeluGrad",
    "sigmoid": "SigmoidGrad",
    "softplus": "SoftplusGrad",
    "tanh": "TanhGrad",
    "max_pool2d": "MaxPoolGrad MaxPoolGradV2 MaxPoolGradWithArgmax MaxPoolGradGrad "
    "MaxPoolGradGradV2 MaxPoolGradGradWithArgmax",
    "max_pool3d": "MaxPool3DGrad MaxPool3DGradGrad",
    "avg_pool2d": "AvgPoolGrad",
    "avg_pool3d": "AvgPool3DGrad",
    "add": "BiasAddGrad",
    "reciprocal": "InvGrad ReciprocalGrad",
    "sqrt": "SqrtGrad",
    "rsqrt": "RsqrtGrad",
    "cholesky": "CholeskyGrad BatchCholeskyGrad",
    "slice": "StridedSliceGrad",
    "tile": "TileGrad",
    "pad": "MirrorPadGrad",
    "upsample": "ResizeBicubicGrad ResizeBilinearGrad ResizeNearestNeighborGrad "
    "ScaleAndTranslateGrad",
    "random": "RandomGammaGrad",
    "fake_quantize": "FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVarsGradient "
    "FakeQuantWithMinMaxVarsPerChannelGradient QuantizeAndDequantizeV4Grad",
}

# Common type of a forward op -> general op types that compute its gradient proper. Auxiliary ops of
# the gradient (shapes, broadcasting, parts of a longer formula) have no common type. Op types with
# the forward op's own common type need no entry: a matmul's gradients are matmuls.
_OWN_OPS = {
    "conv_transpose2d": "Conv2D Conv2DBackpropFilter Conv2DBackpropFilterV2 DepthwiseConv2dNative "
    "DepthwiseConv2dNativeBackpropFilter",
    "conv_transpose3d": "Conv3D Conv3DBackpropFilter Conv3DBackpropFilterV2",
    # The gradient of an operand that was broadcast.
    "add": "Sum",
    "sub": "Neg Sum",
    # The output gradient multiplied by a derivative.
    "square": "Mul",
    "pow": "Mul",
    "div": "Mul",
    "abs": "Mul",
    "exp": "Mul",
    "expm1": "Mul",
    "log": "Mul",
    "log1p": "Mul Xdivy RealDiv",
    "erf": "Mul",
    "erfc": "Mul",
    "sin": "Mul",
    "cos": "Mul",
    "tan": "Mul",
    "asin": "Mul",
    "acos": "Mul Neg",
    "atan": "Mul",
    "sinh": "Mul",
    "cosh": "Mul",
    "softmax": "Mul Sub Sum",
    "log_softmax": "Mul Sub Sum",
    "cross_entropy": "Mul",
    "maximum": "Select SelectV2",
    "minimum": "Select SelectV2",
    "clip": "Select SelectV2",
    "sum": "BroadcastTo Tile Reshape",
    "mean": "RealDiv",
    "prod": "Mul",
    "max": "Mul RealDiv",
    "min": "Mul RealDiv",
    "norm": "RealDiv Mul",
    "segment_reduce": "Gather GatherV2",
    "topk": "ScatterNd",
    "squeeze": "Reshape",
    "unsqueeze": "Reshape",
    "expand": "Sum",
    "tile": "Sum",
    "concat": "Slice Split SplitV",
    "stack": "Unpack",
    "split": "ConcatV2 Pack",
    "slice": "Pad ScatterNd UnsortedSegmentSum",
    "scatter": "Gather GatherV2 GatherNd",
    "pad": "Slice",
    "depth_to_space": "SpaceToDepth",
    "space_to_depth": "DepthToSpace",
    "embedding": "Reshape",
    "real": "Complex",
    "imag": "Complex",
    "complex": "Real Imag",
}

# Roles of the leading inputs -> the op types with these inputs.
ROLES = {
    ("input", "weight"): "Conv Conv2D Conv3D DepthwiseConv2dNative",
    ("input", "paddings", "weight"): "FusedPadConv2D",
    ("input", "size", "paddings", "weight"): "FusedResizeAndPadConv2D",
    ("output_shape", "weight", "input"): "Conv2DBackpropInput Conv3DBackpropInputV2 "
    "DepthwiseConv2dNativeBackpropInput",
    ("output_like", "weight", "input"): "Conv2DBackpropInputV2 Conv3DBackpropInput",
    ("input", "bias"): "BiasAdd BiasAddV1",
    ("input", "weight", "bias", "mean", "variance"): "FusedBatchNorm FusedBatchNormV2 "
    "FusedBatchNormV3",
    ("input", "mean", "variance", "bias", "weight"): "BatchNormWithGlobalNormalization",
    ("left", "right"): "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 SparseMatMul Sub Div "
    "RealDiv DivNoNan Xdivy Pow FloorDiv Mod FloorMod TruncateMod",
    ("weight", "indices", "segments"): _NAMES["embedding_bag"],
    ("input", "target"): _NAMES["cross_entropy"],
}

# I and O are input and output channels of the layer, which a transposed convolution swaps. M is the
# multiplier of a depthwise convolution, which has I * M output channels; its transpose has O * M
# input channels.
WEIGHT_LAYOUTS = {
    "Conv2D": "HWIO",
    "FusedPadConv2D": "HWIO",
    "FusedResizeAndPadConv2D": "HWIO",
    "DepthwiseConv2dNative": "HWIM",
    "Conv3D": "DHWIO",
    "Conv2DBackpropInput": "HWOI",
    "Conv2DBackpropInputV2": "HWOI",
    "DepthwiseConv2dNativeBackpropInput": "HWOM",
    "Conv3DBackpropInput": "DHWOI",
    "Conv3DBackpropInputV2": "DHWOI",
}
_CONV_LAYOUTS = {1: "WIO", 2: "HWIO", 3: "DHWIO"}

# Layout of op types that have no attribute for it, or leave it out.
LAYOUTS = {
    **dict.fromkeys(["conv2d", "conv_transpose2d", "max_pool2d", "avg_pool2d", "upsample"], "NHWC"),
    **dict.fromkeys(["conv3d", "conv_transpose3d", "max_pool3d", "avg_pool3d"], "NDHWC"),
    **dict.fromkeys(["batch_norm", "depth_to_space", "space_to_depth"], "NHWC"),
}
_SPATIAL = {1: "W", 2: "HW", 3: "DHW"}

_TRANSPOSED = {"MatMul": "transpose_b", "SparseMatMul": "transpose_b"}
_TRANSPOSED |= dict.fromkeys(["BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"], "adj_y")
_CUDNN = frozenset({"CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"})
_CUDNN_GRADIENTS = frozenset({"CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3"})


def _by_name(named: Mapping[str, str]) -> dict[str, str]:
    return {name: common_type for common_type, names in named.items() for name in names.split()}


#: Op type -> common type of a forward op.
OP_TYPES: Mapping[str, str] = MappingProxyType(_by_name(_NAMES))

#: Type of a backward op -> common type, if it is the same for any forward op.
BACKWARD_TYPES: Mapping[str, str] = MappingProxyType(
    {name: backward_type_of(common_type) for name, common_type in _by_name(_GRADIENTS).items()}
)

_OWN = {common_type: frozenset(names.split()) for common_type, names in _OWN_OPS.items()}
_ROLES_OF = {name: roles for roles, names in ROLES.items() for name in names.split()}


def describe(context: OpContext) -> None:
    """Set the common keys of a context."""
    if context.is_backward():
        context["backward_type"] = _backward_type(context)
        return
    common_type = context["type"] = _type(context.op_type, context)
    if common_type is None:
        return
    name = context.op_type
    roles = ("weight", "indices") if common_type == "embedding" else _ROLES_OF.get(name)
    if roles is not None:
        context["input_roles"] = roles
    layout = _layout(common_type, context)
    if layout is not None:
        context["layout"] = layout
    weight_layout = _weight_layout(common_type, context)
    if weight_layout is not None:
        context["weight_layout"] = weight_layout


def _type(name: str, context: OpContext) -> str | None:
    """Return the common type of op type `name`, or None.

    Args:
        name: The op type.
        context: The context of that op, or of a backward op of it.
    """
    if name == "Conv":
        rank = _conv_rank(context)
        return None if rank is None else f"conv{rank}d"
    if name in _CUDNN:
        # rnn_relu, rnn_tanh, lstm or gru.
        return _text(context.attrs.get("rnn_mode", "lstm")).partition("_")[0]
    if name in ("Gather", "GatherV2") and _picks_rows(name, context):
        return "embedding"
    return OP_TYPES.get(name)


def _conv_rank(context: OpContext) -> int | None:
    """Return the number of spatial axes of `Conv`, which has one stride per axis."""
    rank = len(context.attrs.get("strides") or ()) - int(context.attrs.get("batch_dims", 1)) - 1
    return rank if rank in _SPATIAL else None


def _picks_rows(name: str, context: OpContext) -> bool:
    """Return True if a gather takes rows of a table, which is a matrix indexed along its first
    axis.
    """
    inputs = context.get_inputs()
    if inputs is None or _rank(inputs[0]) != 2 or context.attrs.get("batch_dims"):
        return False
    if name == "Gather":
        return True
    axis = context.value(2)
    return axis is not None and int(axis) == 0


def _layout(common_type: str, context: OpContext) -> str | None:
    given = context.attrs.get("data_format")
    if context.op_type == "Conv":
        axes = _SPATIAL[int(common_type[4])]
        return f"NC{axes}" if given and _text(given) == "CHANNELS_FIRST" else f"N{axes}C"
    if common_type not in LAYOUTS:
        return None
    return _text(given) if given else LAYOUTS[common_type]


def _weight_layout(common_type: str, context: OpContext) -> str | None:
    name = context.op_type
    if name == "Conv":
        return _CONV_LAYOUTS[int(common_type[4])]
    if name in _TRANSPOSED:
        inputs = context.get_inputs()
        # A batch of matrices has more axes than these two.
        if name != "MatMul" and (inputs is None or _rank(inputs[1]) != 2):
            return None
        return "OI" if context.attrs.get(_TRANSPOSED[name]) else "IO"
    return WEIGHT_LAYOUTS.get(name)


def _backward_type(context: OpContext) -> str | None:
    name, forward = context.op_type, context.forward
    common_type = forward["type"] if forward is not None else None
    if not isinstance(common_type, str) or common_type not in COMMON_TYPES:
        # A tool may have set a type of its own.
        common_type = None if forward is None else _type(forward.op_type, context)
    if name in _CUDNN_GRADIENTS:
        return None if common_type is None else backward_type_of(common_type)
    if common_type is not None and (
        name in _OWN.get(common_type, ()) or OP_TYPES.get(name) == common_type
    ):
        return backward_type_of(common_type)
    return BACKWARD_TYPES.get(name)


def _rank(value: Any) -> int | None:
    """Return the number of axes of a tensor, or None if it is not known."""
    shape = getattr(value, "shape", None)
    rank = getattr(shape, "rank", None)
    if rank is None and isinstance(shape, tuple):
        rank = len(shape)
    return rank if isinstance(rank, int) else None


def _text(value: Any) -> str:
    """Return a string attribute, which may be bytes, as text."""
    return value.decode() if isinstance(value, bytes) else str(value)
