"""Inputs for each differentiable operator of TensorFlow that runs on a CPU.

`SAMPLES` holds calls of `tf.raw_ops`, away from where their gradients jump; `LEFT_OUT` says of
every other operator with a gradient why it has none. Long, as there are so many.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

__all__ = ["LEFT_OUT", "SAMPLES", "Sample"]

_RANDOM = np.random.default_rng(7)


class Sample(NamedTuple):
    """One call of an operator.

    Attributes:
        op_type: Its type.
        inputs: Its inputs in the order of its definition; lists for those of several tensors.
        attrs: Its attributes.
    """

    op_type: str
    inputs: tuple[Any, ...]
    attrs: dict[str, Any]

    def run(self, *inputs: Any, name: str) -> Any:
        """Run it on other inputs."""
        run = getattr(tf.raw_ops, self.op_type)
        known = inspect.signature(run).parameters
        arguments = [argument.name for argument in op_def_registry.get(self.op_type).input_arg]
        called = [each if each in known else _RENAMED[each] for each in arguments]
        return run(**dict(zip(called, inputs, strict=True)), **self.attrs, name=name)


#: Inputs that Python calls otherwise.
_RENAMED = {"reduction_indices": "axis", "dim": "axis", "split_dim": "axis", "t": "x", "e": "y"}


def some(*shape: int, dtype: Any = np.float64) -> Any:
    """Return distinct values from 0.2 to 0.8."""
    count = int(np.prod(shape))
    return (0.2 + 0.6 * _RANDOM.permutation(count) / max(count, 1)).reshape(shape).astype(dtype)


def single(*shape: int) -> Any:
    """Return the same in single precision, for operators that need it."""
    return some(*shape, dtype=np.float32)


def ints(*values: Any) -> Any:
    """Return indices, shapes or axes."""
    return np.array(values, np.int32)


def positive(size: int) -> Any:
    """Return a symmetric positive definite matrix."""
    root = some(size, size)
    return root @ root.T + size * np.eye(size)


def square(size: int) -> Any:
    """Return a matrix that is far from singular."""
    return some(size, size) + 2 * np.diag(np.arange(1.0, size + 1))


_FROM_0_TO_1 = """
    Abs Acos Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0
    BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Ceil Cos Cosh Dawsn Digamma Elu Erf Erfc Erfinv
    Exp Expint Expm1 FresnelCos FresnelSin Identity Inv L2Loss LeakyRelu Lgamma Log Log1p
    LogSoftmax MatrixDiag Ndtri Neg Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin
    Sinh Softmax Softplus Softsign Spence Sqrt Square Tan Tanh Diag
"""
_OF_TWO = """
    Add AddV2 Atan2 Div DivNoNan FloorDiv FloorMod Maximum Minimum Mul MulNoNan Pow RealDiv
    SquaredDifference Sub Xdivy Xlog1py Xlogy Igamma Igammac
"""
_GRADIENTS = """
    EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad
    SoftplusGrad SqrtGrad TanhGrad
"""
_REDUCTIONS = "EuclideanNorm Max Mean Min Prod Sum"
_SEGMENTS = "SegmentMax SegmentMean SegmentMin SegmentProd SegmentSum"
_UNSORTED = "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum"
_SPARSE_SEGMENTS = "SparseSegmentMean SparseSegmentSqrtN SparseSegmentSum"

# Rows and columns of three values of a sparse matrix.
_AT = np.array([[0, 1], [1, 0], [2, 3]], np.int64)
_SHAPE = np.array([3, 4], np.int64)


def _samples() -> Iterator[tuple[Any, ...]]:
    for name in _FROM_0_TO_1.split():
        yield name, some(4) if name == "Diag" else some(3, 4)
    for name in _OF_TWO.split():
        yield name, 2 + some(3, 4), some(4) if name != "Igamma" else some(3, 4)
    for name in _GRADIENTS.split():
        yield name, some(3, 4), some(3, 4)
    for name in _REDUCTIONS.split():
        yield name, some(3, 4), ints(1), {"keep_dims": name == "Max"}
    for name in _SEGMENTS.split():
        yield name, some(4, 3), ints(0, 0, 1, 3)
    for name in _UNSORTED.split():
        yield name, some(4, 3), ints(2, 0, 2, 1), np.int32(3)
    for name in _SPARSE_SEGMENTS.split():
        yield name, some(4, 3), ints(0, 2, 1), ints(0, 0, 1)
        with_count = f"{name}WithNumSegments"
        yield with_count, some(4, 3), ints(0, 2, 1), ints(0, 0, 2), np.int32(4)
    yield "Acosh", 1.5 + some(3, 4)
    yield "Floor", 10 * some(3, 4)
    yield "Betainc", some(3), 1 + some(3), some(3)
    yield "Zeta", 2 + some(3), 1 + some(3)
    yield "NextAfter", some(3), some(3)
    yield "AddN", [some(3), some(3), some(3)]
    yield "IdentityN", [some(3), some(2, 2)]
    yield "Cast", some(3), {"DstT": tf.float32}
    yield "CheckNumerics", some(3), {"message": "bad"}
    yield "CheckNumericsV2", some(3), {"message": "bad"}
    yield "EnsureShape", some(3), {"shape": [3]}
    yield "Fill", ints(2, 3), some()
    yield "ClipByValue", some(3, 4), np.array(0.35), np.array(0.65)
    yield "SelectV2", np.array([True, False, True]), some(2, 3), some(3)
    yield "Select", np.array([True, False, True]), some(3), some(3)
    # Products of matrices, and what is made of one.
    yield "MatMul", some(4, 3), some(4, 2), {"transpose_a": True}
    yield "MatMul", some(3, 4), some(2, 4), {"transpose_b": True}
    yield "SparseMatMul", single(3, 4), single(4, 2)
    yield "BatchMatMul", some(2, 3, 4), some(2, 4, 2)
    yield "BatchMatMulV2", some(2, 3, 4), some(4, 2)
    yield "BatchMatMulV2", some(2, 4, 3), some(2, 2, 4), {"adj_x": True, "adj_y": True}
    yield "BatchMatMulV3", some(2, 3, 4), some(2, 4, 2), {"Tout": tf.float64}
    yield "Einsum", [some(3, 4), some(4, 2)], {"equation": "ab,bc->ac"}
    yield "Einsum", [some(2, 3, 3)], {"equation": "bii->b"}
    yield "Cholesky", positive(3)
    yield "MatrixInverse", square(3)
    yield "MatrixDeterminant", square(3)
    yield "LogMatrixDeterminant", square(3)
    yield "MatrixSolve", square(3), some(3, 2)
    yield "MatrixSolveLs", some(4, 2) + np.eye(4, 2), some(4, 1), np.array(0.1)
    yield "MatrixTriangularSolve", np.tril(square(3)), some(3, 2)
    yield "BandedTriangularSolve", np.array([[3.0, 4, 5], [0.0, 1, 2]]), some(3, 2)
    yield "MatrixSquareRoot", positive(3)
    yield "Qr", square(3)
    yield "Svd", square(3)
    yield "SelfAdjointEigV2", positive(3)
    yield "Eig", square(3), {"Tout": tf.complex128}
    yield "TridiagonalSolve", np.array([[1.0, 1, 0], [4, 5, 6], [0, 1, 1]]), some(3, 2)
    yield "TridiagonalMatMul", some(1, 3), some(1, 3), some(1, 3), some(3, 2)
    yield "Cross", some(2, 3), some(2, 3)
    yield "DiagPart", some(3, 3)
    yield "MatrixDiagPart", some(3, 4)
    yield "MatrixDiagV2", some(3), np.int32(1), np.int32(-1), np.int32(-1), np.array(0.5)
    yield "MatrixDiagV3", some(3), np.int32(1), np.int32(-1), np.int32(-1), np.array(0.5)
    yield "MatrixDiagPartV2", some(3, 4), np.int32(1), np.array(0.5)
    yield "MatrixDiagPartV3", some(3, 4), ints(-1, 1), np.array(0.5)
    yield "MatrixSetDiag", some(3, 4), some(3)
    yield "MatrixSetDiagV2", some(3, 4), some(3), np.int32(1)
    yield "MatrixSetDiagV3", some(3, 4), some(2, 3), ints(0, 1)
    yield "MatrixBandPart", some(3, 4), np.int64(1), np.int64(0)
    # Sums along an axis.
    yield "Cumsum", some(3, 4), np.int32(1), {"exclusive": True}
    yield "Cumprod", some(3, 4), np.int32(0), {"reverse": True}
    yield "CumulativeLogsumexp", some(3, 4), np.int32(1)
    # Shapes.
    yield "Reshape", some(3, 4), ints(2, 6)
    yield "ExpandDims", some(3, 4), np.int32(1)
    yield "Squeeze", some(3, 1, 4), {"axis": [1]}
    yield "Transpose", some(2, 3, 4), ints(2, 0, 1)
    yield "ConjugateTranspose", some(2, 3), ints(1, 0)
    yield "Tile", some(2, 3), ints(2, 1)
    yield "Pad", some(2, 3), ints([1, 0], [0, 2])
    yield "PadV2", some(2, 3), ints([1, 0], [0, 2]), np.array(0.5)
    yield "MirrorPad", some(3, 3), ints([1, 1], [0, 2]), {"mode": "REFLECT"}
    yield "MirrorPadGrad", some(5, 5), ints([1, 1], [0, 2]), {"mode": "REFLECT"}
    yield "Slice", some(3, 4), ints(1, 0), ints(2, 3)
    yield "StridedSlice", some(3, 4), ints(0, 1), ints(3, 4), ints(2, 1), {"shrink_axis_mask": 2}
    yield "StridedSliceGrad", ints(3, 4), ints(0, 1), ints(3, 4), ints(2, 1), some(2, 3)
    yield (
        *("TensorStridedSliceUpdate", some(3, 4), ints(0, 1), ints(3, 4), ints(2, 1)),
        some(2, 3),
    )
    yield "Concat", np.int32(1), [some(3, 2), some(3, 1)]
    yield "ConcatV2", [some(3, 2), some(3, 1), some(3, 3)], np.int32(1)
    yield "Pack", [some(3), some(3)], {"axis": 1}
    yield "Unpack", some(3, 2), {"num": 2, "axis": 1}
    yield "Split", np.int32(1), some(3, 4), {"num_split": 2}
    yield "SplitV", some(3, 4), ints(1, 3), np.int32(1), {"num_split": 2}
    yield "Reverse", some(3, 4), np.array([False, True])
    yield "ReverseV2", some(3, 4), ints(0)
    yield "ReverseSequence", some(3, 4), ints(2, 4, 1), {"seq_dim": 1}
    yield "Roll", some(3, 4), ints(1), ints(1)
    yield "BroadcastTo", some(3, 1), ints(2, 3, 4)
    yield "Gather", some(4, 3), ints(2, 0, 2)
    yield "GatherV2", some(4, 3), ints(2, 0, 2), np.int32(0)
    yield "GatherV2", some(4, 3), ints(2, 0, 2), np.int32(1)
    yield "GatherNd", some(4, 3), ints([2, 0], [0, 1])
    yield "ScatterNd", ints([2], [0]), some(2, 3), ints(4, 3)
    yield "ScatterNdNonAliasingAdd", some(4, 3), ints([2], [0]), some(2, 3)
    for name in ("Add", "Max", "Min", "Sub", "Update"):
        yield f"TensorScatter{name}", some(4, 3), ints([2], [0]), some(2, 3)
    yield "SpaceToBatch", some(1, 4, 4, 1), ints([0, 0], [0, 0]), {"block_size": 2}
    yield "BatchToSpace", some(4, 2, 2, 1), ints([0, 0], [0, 0]), {"block_size": 2}
    yield "SpaceToBatchND", some(1, 4, 3), ints(2), ints([[1, 1]])[0]
    yield "BatchToSpaceND", some(2, 3, 3), ints(2), ints([[1, 1]])[0]
    yield "SpaceToDepth", some(1, 4, 4, 1), {"block_size": 2}
    yield "DepthToSpace", some(1, 2, 2, 4), {"block_size": 2}
    yield "DynamicPartition", some(4, 3), ints(0, 1, 0, 1), {"num_partitions": 2}
    yield "DynamicStitch", [ints(0, 2), ints(1, 3)], [some(2, 3), some(2, 3)]
    yield "ParallelDynamicStitch", [ints(0, 2), ints(1, 3)], [some(2, 3), some(2, 3)]
    # Layers.
    image, padded = some(1, 6, 6, 2), {"strides": [1, 1, 1, 1], "padding": "SAME"}
    window = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    volume = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "VALID"}
    yield "Conv2D", image, some(3, 3, 2, 3), padded
    yield "Conv2D", image, some(3, 3, 2, 3), {"strides": [1, 2, 2, 1], "padding": "VALID"}
    yield "Conv2DBackpropInput", ints(1, 6, 6, 2), some(3, 3, 2, 3), some(1, 6, 6, 3), padded
    yield "Conv2DBackpropFilter", image, ints(3, 3, 2, 3), some(1, 6, 6, 3), padded
    yield (
        *("Conv3D", some(1, 3, 3, 3, 2), some(2, 2, 2, 2, 2)),
        {"strides": [1, 1, 1, 1, 1], "padding": "SAME"},
    )
    yield "DepthwiseConv2dNative", image, some(3, 3, 2, 2), padded
    yield (
        *("DepthwiseConv2dNativeBackpropInput", ints(1, 6, 6, 2), some(3, 3, 2, 2)),
        *(some(1, 6, 6, 4), padded),
    )
    yield (
        *("DepthwiseConv2dNativeBackpropFilter", image, ints(3, 3, 2, 2), some(1, 6, 6, 4)),
        padded,
    )
    yield "Dilation2D", image, some(2, 2, 2), dict(rates=[1, 1, 1, 1], **padded)
    yield "AvgPool", image, window
    yield "AvgPoolGrad", ints(1, 6, 6, 2), some(1, 3, 3, 2), window
    yield "AvgPool3D", single(1, 4, 4, 4, 1), volume
    yield "MaxPool", image, window
    yield (
        *("MaxPoolV2", image, ints(1, 2, 2, 1), ints(1, 2, 2, 1)),
        {"padding": "VALID"},
    )
    yield "MaxPoolWithArgmax", image, window
    yield "MaxPool3D", single(1, 4, 4, 4, 1), volume
    chosen = single(1, 3, 3, 2)
    yield "MaxPoolGrad", single(1, 6, 6, 2), chosen, single(1, 3, 3, 2), window
    yield (
        *("MaxPoolGradV2", single(1, 6, 6, 2), chosen, single(1, 3, 3, 2)),
        *(ints(1, 2, 2, 1), ints(1, 2, 2, 1), {"padding": "VALID"}),
    )
    yield "MaxPoolGradGrad", single(1, 6, 6, 2), chosen, single(1, 6, 6, 2), window
    yield (
        *("MaxPool3DGrad", single(1, 4, 4, 4, 1), single(1, 2, 2, 2, 1)),
        *(single(1, 2, 2, 2, 1), volume),
    )
    yield "AvgPool3DGrad", ints(1, 4, 4, 4, 1), single(1, 2, 2, 2, 1), volume
    cube = {"strides": [1, 1, 1, 1, 1], "padding": "SAME"}
    yield (
        *("Conv3DBackpropInputV2", ints(1, 3, 3, 3, 2), some(2, 2, 2, 2, 2)),
        *(some(1, 3, 3, 3, 2), cube),
    )
    yield (
        *("Conv3DBackpropFilterV2", some(1, 3, 3, 3, 2), ints(2, 2, 2, 2, 2)),
        *(some(1, 3, 3, 3, 2), cube),
    )
    yield "BiasAdd", image, some(2)
    yield "BiasAddV1", image, some(2)
    yield "BiasAddGrad", image
    batch = [single(2) for _ in range(4)]
    for name in ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"):
        yield name, single(2, 3, 3, 2), *batch, {"is_training": False}
    nothing = np.zeros(0, np.float32)
    yield "FusedBatchNormV3", single(2, 3, 3, 2), *batch[:2], nothing, nothing
    yield "LRN", single(1, 3, 3, 4)
    yield "SoftmaxCrossEntropyWithLogits", some(3, 4), np.full((3, 4), 0.25)
    yield "SparseSoftmaxCrossEntropyWithLogits", some(3, 4), ints(1, 0, 3)
    yield (
        *("CTCLoss", some(4, 2, 3), np.array([[0, 0], [1, 0]], np.int64), ints(0, 1)),
        ints(4, 4),
    )
    yield "TopKV2", some(3, 4), np.int32(2)
    yield "NthElement", some(3, 4), np.int32(1)
    yield "IsotonicRegression", some(2, 4), {"output_dtype": tf.float64}
    gates = some(2 + 3, 4 * 3)
    peephole = [np.zeros(3, np.float32) for _ in range(3)]
    yield (
        *("BlockLSTM", np.int64(2), single(2, 1, 2), single(1, 3), single(1, 3)),
        *(gates.astype(np.float32), *peephole, single(12), {"use_peephole": False}),
    )
    yield "FakeQuantWithMinMaxArgs", single(3, 4), {"min": 0.0, "max": 1.0}
    yield "FakeQuantWithMinMaxVars", single(3, 4), np.float32(0.3), np.float32(0.7)
    low, high = np.full(4, 0.3, np.float32), np.full(4, 0.7, np.float32)
    yield "FakeQuantWithMinMaxVarsPerChannel", single(3, 4), low, high
    limits = np.array(0.0), np.array(1.0)
    yield "QuantizeAndDequantizeV2", some(3, 4), *limits
    yield "QuantizeAndDequantizeV3", some(3, 4), *limits, np.int32(8)
    yield (
        "QuantizeAndDequantizeV4",
        some(3, 4),
        np.array(0.3),
        np.array(0.7),
        {"range_given": True},
    )
    # Images.
    yield "ResizeBilinear", some(1, 3, 3, 1), ints(5, 4)
    yield "ResizeBicubic", some(1, 3, 3, 1), ints(5, 4)
    yield "ResizeNearestNeighbor", some(1, 3, 3, 1), ints(5, 4)
    boxes = np.array([[0.1, 0.1, 0.8, 0.7]], np.float32)
    yield "CropAndResize", single(1, 5, 5, 1), boxes, ints(0), ints(3, 3)
    yield (
        *("ScaleAndTranslate", single(1, 4, 4, 1), ints(6, 6), np.array([1.5, 1.5], np.float32)),
        np.array([0.0, 0.5], np.float32),
    )
    turned = np.array([[0.9, 0.1, 0, -0.1, 0.9, 0, 0, 0]], np.float32)
    yield (
        *("ImageProjectiveTransformV2", single(1, 4, 4, 1), turned, ints(4, 4)),
        {"interpolation": "BILINEAR"},
    )
    yield (
        *("ImageProjectiveTransformV3", single(1, 4, 4, 1), turned, ints(4, 4), np.float32(0)),
        {"interpolation": "BILINEAR"},
    )
    yield "RGBToHSV", some(2, 3)
    patches = {"strides": [1, 2, 2, 1], "rates": [1, 1, 1, 1], "padding": "VALID"}
    yield "ExtractImagePatches", image, dict(ksizes=[1, 2, 2, 1], **patches)
    cubes = {"ksizes": [1, 2, 2, 2, 1], "strides": [1, 2, 2, 2, 1], "padding": "VALID"}
    yield "ExtractVolumePatches", some(1, 4, 4, 4, 1), cubes
    # Complex numbers.
    turning = some(4) + 1j * some(4)
    yield "Complex", some(4), some(4), {"Tout": tf.complex128}
    for name in ("Angle", "Imag", "Real", "ComplexAbs"):
        yield name, turning, {"Tout": tf.float64}
    yield "Conj", turning
    for name in ("FFT", "IFFT"):
        yield name, turning
    for name in ("FFT2D", "IFFT2D"):
        yield name, some(2, 4) + 1j * some(2, 4)
    for name in ("FFT3D", "IFFT3D"):
        yield name, some(2, 2, 2) + 1j * some(2, 2, 2)
    yield "RFFT", some(6), ints(6), {"Tcomplex": tf.complex128}
    yield "IRFFT", turning, ints(6), {"Treal": tf.float64}
    yield "RFFT2D", some(4, 6), ints(4, 6), {"Tcomplex": tf.complex128}
    yield "IRFFT2D", some(4, 4) + 1j * some(4, 4), ints(4, 6), {"Treal": tf.float64}
    # Sparse tensors.
    other = np.array([[0, 1], [1, 2]], np.int64)
    yield "SparseTensorDenseMatMul", _AT, some(3), _SHAPE, some(4, 2)
    yield "SparseTensorDenseAdd", _AT, some(3), _SHAPE, some(3, 4)
    for name in ("Div", "Mul"):
        yield f"SparseDenseCwise{name}", _AT, some(3), _SHAPE, some(3, 4)
    yield "SparseAdd", _AT, some(3), _SHAPE, other, some(2), _SHAPE, np.array(0.0)
    yield "SparseReduceSum", _AT, some(3), _SHAPE, ints(1)
    yield "SparseReorder", _AT[::-1].copy(), some(3), _SHAPE
    yield (
        "SparseSlice",
        _AT,
        some(3),
        _SHAPE,
        np.array([0, 0], np.int64),
        np.array([2, 4], np.int64),
    )
    yield "SparseSoftmax", _AT, some(3), _SHAPE
    yield "SparseToDense", _AT, _SHAPE, some(3), np.array(0.0)
    yield "SparseFillEmptyRows", _AT[[0, 2]], some(2), _SHAPE, np.array(0.5)
    # Ragged tensors.
    yield (
        *("RaggedGather", [np.array([0, 2, 3], np.int64)], some(3, 2), ints(1, 0)),
        {"OUTPUT_RAGGED_RANK": 1},
    )
    yield (
        *("RaggedTensorToTensor", np.array([2, 2], np.int64), some(3), np.array(0.5)),
        *([np.array([0, 2, 3], np.int64)], {"row_partition_types": ["ROW_SPLITS"]}),
    )
    yield "RaggedTensorToSparse", [np.array([0, 2, 3], np.int64)], some(3)
    # Samples of distributions, by their parameters.
    yield "StatelessRandomGammaV2", ints(3), ints(1, 2), 1 + some(3)
    yield (
        *("StatelessParameterizedTruncatedNormal", ints(3), ints(1, 2), some(3), 1 + some(3)),
        *(np.full(3, -2.0), np.full(3, 3.0)),
    )


def _made(op_type: str, *rest: Any) -> Sample:
    attrs = rest[-1] if isinstance(rest[-1], dict) else {}
    return Sample(op_type, rest[: len(rest) - bool(attrs)], attrs)


SAMPLES: Sequence[Sample] = [_made(*sample) for sample in _samples()]

LEFT_OUT: dict[str, str] = {
    # Patterns of `fnmatch` -> reasons.
    **dict.fromkeys(("AllToAll", "CollectivePermute", "Copy*", "Cross*Sum", "Nccl*"), "devices"),
    **dict.fromkeys(("CudnnRNN*", "Relayout*", "TPU*", "Xla*"), "devices"),
    **dict.fromkeys(("CTCLossV2", "AccumulateNV2", "ApproxTopK"), "no kernel for a CPU"),
    **dict.fromkeys(("BatchNormWithGlobal*", "QuantizeAndDequantize"), "TensorFlow has ended it"),
    **dict.fromkeys(("Case", "If", "Stateless[CIW]*e", "StatelessIf", "While"), "control flow"),
    **dict.fromkeys(("Enter", "Exit", "LoopCond", "Merge", "NextIteration"), "control flow"),
    **dict.fromkeys(("Switch", "Ref*", "TensorArray*", "TensorList*"), "control flow"),
    **dict.fromkeys(("CSR*", "DenseToCSR*", "SparseMatrix*", "*ToCSR*"), "variants"),
    **dict.fromkeys(("CompositeTensor*", "Optional*", "Ragged*Variant"), "variants"),
    **dict.fromkeys(("ReadVariableOp", "ResourceGather*"), "handles of variables"),
    **dict.fromkeys(("ArgM*", "TruncateDiv"), "integers"),
    **dict.fromkeys(("Debug*", "EagerPyFunc", "Print", "PlaceholderWithDefault"), "own tests"),
    **dict.fromkeys(("PreventGradient", "SparseDenseCwiseAdd"), "its gradient raises"),
    **dict.fromkeys(("SparseSparseM*", "MaxPool3DGradGrad"), "its gradient raises"),
    **dict.fromkeys(("RandomGamma", "StatelessRandomGammaV3"), "another state for each run"),
    "Fractional*Pool": "its shapes are not those that TensorFlow states",
    "Polygamma": "its order is an integer, written as a float",
    "TopK": "TopKV2, with an attribute for an input",
    "BlockLSTMV2": "BlockLSTM, with other gates",
    "FusedBatchNormGrad*": "reads what FusedBatchNorm keeps",
    "QuantizeAndDequantizeV4Grad": "its gradient has none",
    "RaggedFillEmptyRows": "SparseFillEmptyRows for ragged tensors",
    "_EagerConst": "made by TensorFlow alone",
}
