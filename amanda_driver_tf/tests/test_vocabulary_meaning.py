"""The words against what the operators compute: each op type beside NumPy's idea of its word.

Runs plain TensorFlow, without tools. What a word means stands here in NumPy; which op types go by
it is read from the table under test, so that a wrong entry computes something else.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from amanda_driver_tf.vocabulary import OP_TYPES

Array = Any

RANDOM = np.random.default_rng(0)
MATRIX = RANDOM.uniform(0.1, 0.9, (3, 4)).astype(np.float32)
OTHER = RANDOM.uniform(0.1, 0.9, (3, 4)).astype(np.float32)
SIGNED = (MATRIX - 0.5) * 12
SQUARE = (RANDOM.uniform(0.1, 0.9, (3, 3)) + 3 * np.eye(3)).astype(np.float32)
SYMMETRIC = SQUARE @ SQUARE.T
IMAGE = RANDOM.standard_normal((2, 6, 6, 4)).astype(np.float32)
VOLUME = RANDOM.standard_normal((1, 4, 4, 4, 2)).astype(np.float32)
INTEGERS = np.array([5, -3, 12], np.int32)
TRUTHS = np.array([True, False, True]), np.array([True, True, False])


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def erf(x: Array) -> Array:
    return np.vectorize(math.erf)(x)


#: Word -> (argument, meaning) of op types with one input.
UNARY: dict[str, tuple[Array, Callable[[Array], Array]]] = {
    "relu": (SIGNED, lambda x: np.maximum(x, 0)),
    "relu6": (SIGNED, lambda x: np.clip(x, 0, 6)),
    "leaky_relu": (SIGNED, lambda x: np.where(x > 0, x, 0.2 * x)),
    "elu": (SIGNED, lambda x: np.where(x > 0, x, np.expm1(x))),
    "selu": (
        SIGNED,
        lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x)),
    ),
    "sigmoid": (SIGNED, sigmoid),
    "softplus": (SIGNED, lambda x: np.log1p(np.exp(x))),
    "softmax": (SIGNED, softmax),
    "log_softmax": (SIGNED, lambda x: np.log(softmax(x))),
    "tanh": (SIGNED, np.tanh),
    "neg": (SIGNED, np.negative),
    "abs": (SIGNED, np.abs),
    "sign": (SIGNED, np.sign),
    "reciprocal": (SIGNED, lambda x: 1 / x),
    "square": (SIGNED, lambda x: x * x),
    "sqrt": (MATRIX, np.sqrt),
    "rsqrt": (MATRIX, lambda x: 1 / np.sqrt(x)),
    "exp": (SIGNED, np.exp),
    "expm1": (SIGNED, np.expm1),
    "log": (MATRIX, np.log),
    "log1p": (MATRIX, np.log1p),
    "erf": (MATRIX, erf),
    "erfc": (MATRIX, lambda x: 1 - erf(x)),
    "sin": (SIGNED, np.sin),
    "cos": (SIGNED, np.cos),
    "tan": (SIGNED, np.tan),
    "asin": (MATRIX, np.arcsin),
    "acos": (MATRIX, np.arccos),
    "atan": (SIGNED, np.arctan),
    "sinh": (SIGNED, np.sinh),
    "cosh": (SIGNED, np.cosh),
    "floor": (SIGNED, np.floor),
    "ceil": (SIGNED, np.ceil),
    "round": (SIGNED, np.round),
    "real": (SIGNED + 1j * MATRIX, np.real),
    "imag": (SIGNED + 1j * MATRIX, np.imag),
    "conj": (SIGNED + 1j * MATRIX, np.conj),
    "logical_not": (TRUTHS[0], np.logical_not),
    "bitwise_not": (INTEGERS, np.invert),
    "isnan": (np.array([1, np.nan, np.inf], np.float32), np.isnan),
    "isinf": (np.array([1, np.nan, np.inf], np.float32), np.isinf),
    "isfinite": (np.array([1, np.nan, np.inf], np.float32), np.isfinite),
    "inverse": (SQUARE, np.linalg.inv),
    "det": (SQUARE, np.linalg.det),
    "cholesky": (SYMMETRIC, np.linalg.cholesky),
    "squeeze": (MATRIX[:, None], np.squeeze),
    "identity": (MATRIX, lambda x: x),
    "nonzero": (TRUTHS[0], lambda x: np.argwhere(x)),
}
#: Word -> (arguments, meaning) of op types with two inputs.
BINARY: dict[str, tuple[tuple[Array, Array], Callable[[Array, Array], Array]]] = {
    "matmul": ((MATRIX, OTHER.T.copy()), np.matmul),
    "add": ((MATRIX, OTHER[0]), np.add),
    "sub": ((MATRIX, OTHER), np.subtract),
    "mul": ((MATRIX, OTHER), np.multiply),
    "div": ((MATRIX, OTHER), np.divide),
    "floor_div": ((SIGNED, OTHER), np.floor_divide),
    "mod": ((MATRIX, OTHER), np.mod),
    "pow": ((MATRIX, OTHER), np.power),
    "atan2": ((SIGNED, OTHER), np.arctan2),
    "maximum": ((MATRIX, OTHER), np.maximum),
    "minimum": ((MATRIX, OTHER), np.minimum),
    "complex": ((MATRIX, OTHER), lambda x, y: x + 1j * y),
    "equal": ((INTEGERS, INTEGERS[::-1]), np.equal),
    "not_equal": ((INTEGERS, INTEGERS[::-1]), np.not_equal),
    "less": ((MATRIX, OTHER), np.less),
    "less_equal": ((MATRIX, OTHER), np.less_equal),
    "greater": ((MATRIX, OTHER), np.greater),
    "greater_equal": ((MATRIX, OTHER), np.greater_equal),
    "logical_and": (TRUTHS, np.logical_and),
    "logical_or": (TRUTHS, np.logical_or),
    "bitwise_and": ((INTEGERS, INTEGERS + 1), np.bitwise_and),
    "bitwise_or": ((INTEGERS, INTEGERS + 1), np.bitwise_or),
    "bitwise_xor": ((INTEGERS, INTEGERS + 1), np.bitwise_xor),
    "solve": ((np.tril(SQUARE), SQUARE), np.linalg.solve),
    "sum": ((MATRIX, np.int32(1)), lambda x, axis: x.sum(axis)),
    "mean": ((MATRIX, np.int32(1)), lambda x, axis: x.mean(axis)),
    "prod": ((MATRIX, np.int32(1)), lambda x, axis: x.prod(axis)),
    "max": ((MATRIX, np.int32(1)), lambda x, axis: x.max(axis)),
    "min": ((MATRIX, np.int32(1)), lambda x, axis: x.min(axis)),
    "argmax": ((MATRIX, np.int32(1)), lambda x, axis: x.argmax(axis)),
    "argmin": ((MATRIX, np.int32(1)), lambda x, axis: x.argmin(axis)),
    "any": ((MATRIX > 0.5, np.int32(1)), lambda x, axis: x.any(axis)),
    "all": ((MATRIX > 0.5, np.int32(1)), lambda x, axis: x.all(axis)),
    "norm": ((MATRIX, np.int32(1)), lambda x, axis: np.linalg.norm(x, axis=axis)),
    "cumsum": ((MATRIX, np.int32(1)), np.cumsum),
    "cumprod": ((MATRIX, np.int32(1)), np.cumprod),
    "reshape": ((MATRIX, np.array([2, 6])), np.reshape),
    "transpose": ((VOLUME, np.array([4, 0, 2, 1, 3])), np.transpose),
    "expand": ((MATRIX, np.array([2, 3, 4])), np.broadcast_to),
    "tile": ((MATRIX, np.array([2, 3])), np.tile),
    "unsqueeze": ((MATRIX, np.int32(1)), np.expand_dims),
    "full": ((np.array([2, 3]), np.float32(7)), np.full),
}


def arguments_of(op_type: str) -> list[Any]:
    return list(op_def_registry.get(op_type).input_arg)


def of_words(words: Iterable[str], count: int) -> list[str]:
    """Return the op types of these common types with so many inputs, all tensors."""
    return [
        name
        for name, word in OP_TYPES.items()
        if word in words
        and len(arguments_of(name)) == count
        and not any(a.is_ref or a.number_attr or a.type_list_attr for a in arguments_of(name))
        and not any(a.type == tf.resource.as_datatype_enum for a in arguments_of(name))
        and name not in NOT_HERE
    ]


#: Why some op types are not run here.
NOT_HERE = {
    **dict.fromkeys(["BatchMatrixInverse", "BatchMatrixDeterminant"], "has no kernel any more"),
    **dict.fromkeys(["BatchCholesky", "BatchMatrixSolve"], "has no kernel any more"),
    "BatchMatrixTriangularSolve": "has no kernel any more",
    **dict.fromkeys(["DebugIdentity", "DebugIdentityV3"], "takes the name of a debugged tensor"),
    "SparseMatrixMatMul": "takes a handle of a sparse matrix",
    "SparseMatrixSparseMatMul": "takes handles of sparse matrices",
    "SparseMatrixSparseCholesky": "takes a handle of a sparse matrix",
    "BandedTriangularSolve": "takes the bands of a matrix",
    "TridiagonalSolve": "takes the diagonals of a matrix",
}
#: Attributes without a default.
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "CheckNumerics": {"message": ""},
    "CheckNumericsV2": {"message": ""},
    "EnsureShape": {"shape": MATRIX.shape},
    "PlaceholderWithDefault": {"shape": MATRIX.shape},
    "BatchMatMulV3": {"Tout": tf.float32},
}


def run(op_type: str, *values: Array, **attributes: Any) -> Any:
    """Return the result of an op, or a list of its results."""
    operator = getattr(tf.raw_ops, op_type)
    # Some arguments go by other names in Python, but in the same order.
    names = list(inspect.signature(operator).parameters)
    given = {**dict(zip(names, values, strict=False)), **ATTRIBUTES.get(op_type, {}), **attributes}
    graph = tf.Graph()
    with graph.as_default(), tf.compat.v1.Session(graph=graph) as session:
        return session.run(operator(**given))


@pytest.mark.parametrize("op_type", of_words(UNARY, 1))
def test_one_input(op_type: str) -> None:
    argument, meaning = UNARY[OP_TYPES[op_type]]
    if op_type == "ComplexAbs":
        argument = argument + 1j * MATRIX
    np.testing.assert_allclose(run(op_type, argument), meaning(argument), rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("op_type", of_words(BINARY, 2))
def test_two_inputs(op_type: str) -> None:
    values, meaning = BINARY[OP_TYPES[op_type]]
    np.testing.assert_allclose(run(op_type, *values), meaning(*values), rtol=1e-4, atol=1e-5)


def windows(x: Array, size: int) -> Array:
    """Return the windows of a batch: (n, h, w, c) -> (n, h - size + 1, w - size + 1, c, size,
    size).
    """
    return np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(1, 2))


KERNEL = RANDOM.standard_normal((3, 3, 4, 5)).astype(np.float32)
DEPTHWISE = RANDOM.standard_normal((3, 3, 4, 2)).astype(np.float32)
ONES = [1, 1, 1, 1]


def convolved(x: Array, kernel: Array) -> Array:
    return np.einsum("nhwcij,ijco->nhwo", windows(x, 3), kernel)


def transposed(y: Array, kernel: Array) -> Array:
    """Scatter each value of `y` through the kernel (3, 3, out, in)."""
    n, h, w, _ = y.shape
    x = np.zeros((n, h + 2, w + 2, kernel.shape[2]), np.float32)
    for i in range(3):
        for j in range(3):
            x[:, i : i + h, j : j + w] += np.einsum("nhwo,co->nhwc", y, kernel[i, j])
    return x


def normalised(x: Array, axes: tuple[int, ...]) -> Array:
    return (x - x.mean(axes)) / np.sqrt(x.var(axes) + 1e-4)


SMALL = IMAGE[:, :4, :4]
SCALE = np.array([1, 2, 3, 4], np.float32)
SEGMENTS = np.array([0, 0, 1], np.int32)
POOL = {"ksize": [1, 3, 3, 1], "strides": ONES, "padding": "VALID"}
VALID = {"strides": ONES, "padding": "VALID"}

#: (op type, arguments, attributes) and what its word means of them.
OTHERS: list[tuple[str, tuple[Any, ...], dict[str, Any], Array]] = [
    ("Conv2D", (IMAGE, KERNEL), VALID, convolved(IMAGE, KERNEL)),
    ("Conv", (IMAGE, KERNEL), VALID, convolved(IMAGE, KERNEL)),
    (
        "DepthwiseConv2dNative",
        (IMAGE, DEPTHWISE),
        VALID,
        np.einsum("nhwcij,ijcm->nhwcm", windows(IMAGE, 3), DEPTHWISE).reshape(2, 4, 4, 8),
    ),
    (
        "Conv2DBackpropInput",
        (np.array([2, 6, 6, 5]), KERNEL.transpose(0, 1, 3, 2), SMALL),
        VALID,
        transposed(SMALL, KERNEL.transpose(0, 1, 3, 2)),
    ),
    ("MaxPool", (IMAGE,), POOL, windows(IMAGE, 3).max((-1, -2))),
    ("AvgPool", (IMAGE,), POOL, windows(IMAGE, 3).mean((-1, -2))),
    ("BiasAdd", (IMAGE, SCALE), {}, IMAGE + SCALE),
    ("AddN", ([MATRIX, OTHER],), {}, MATRIX + OTHER),
    ("AccumulateNV2", ([MATRIX, OTHER],), {"shape": [3, 4]}, MATRIX + OTHER),
    ("Einsum", ([MATRIX, OTHER],), {"equation": "ij,kj->ik"}, MATRIX @ OTHER.T),
    ("BatchMatMul", (MATRIX, OTHER.T.copy()), {}, MATRIX @ OTHER.T),
    ("ClipByValue", (MATRIX, 0.2, 0.8), {}, MATRIX.clip(0.2, 0.8)),
    ("SelectV2", (MATRIX > 0.5, MATRIX, OTHER), {}, np.where(MATRIX > 0.5, MATRIX, OTHER)),
    ("Select", (MATRIX > 0.5, MATRIX, OTHER), {}, np.where(MATRIX > 0.5, MATRIX, OTHER)),
    ("ConcatV2", ([MATRIX, OTHER], 1), {}, np.concatenate([MATRIX, OTHER], 1)),
    ("Concat", (1, [MATRIX, OTHER]), {}, np.concatenate([MATRIX, OTHER], 1)),
    ("Pack", ([MATRIX, OTHER],), {"axis": 1}, np.stack([MATRIX, OTHER], 1)),
    ("Split", (1, MATRIX), {"num_split": 2}, np.split(MATRIX, 2, 1)),
    ("Unpack", (MATRIX,), {"num": 3}, list(MATRIX)),
    ("Slice", (MATRIX, [0, 1], [2, 2]), {}, MATRIX[:2, 1:3]),
    ("StridedSlice", (MATRIX, [0, 3], [3, 0], [2, -1]), {}, MATRIX[0:3:2, 3:0:-1]),
    ("Gather", (MATRIX, [2, 0]), {}, MATRIX[[2, 0]]),
    ("GatherV2", (MATRIX, [2, 0], 1), {}, MATRIX[:, [2, 0]]),
    ("GatherNd", (MATRIX, [[2, 0], [1, 1]]), {}, MATRIX[[2, 1], [0, 1]]),
    ("ReverseV2", (MATRIX, [1]), {}, MATRIX[:, ::-1]),
    ("Roll", (MATRIX, [1], [1]), {}, np.roll(MATRIX, 1, 1)),
    ("MatrixDiagV3", (MATRIX[0], 0, -1, -1, 0.0), {}, np.diag(MATRIX[0])),
    ("MatrixDiagPartV3", (MATRIX, 0, 0.0), {}, np.diag(MATRIX)),
    ("Pad", (MATRIX, [[1, 0], [0, 2]]), {}, np.pad(MATRIX, [[1, 0], [0, 2]])),
    (
        "MirrorPad",
        (MATRIX, [[1, 0], [0, 2]]),
        {"mode": "REFLECT"},
        np.pad(MATRIX, [[1, 0], [0, 2]], "reflect"),
    ),
    ("Cast", (MATRIX,), {"DstT": tf.int32}, MATRIX.astype(np.int32)),
    ("Bitcast", (MATRIX,), {"type": tf.int32}, MATRIX.view(np.int32)),
    ("OneHot", ([1, 0], 3, 1.0, 0.0), {}, np.eye(3)[[1, 0]]),
    ("Range", (1, 7, 2), {}, np.arange(1, 7, 2)),
    ("LinSpace", (0.0, 1.0, 5), {}, np.linspace(0, 1, 5)),
    ("ZerosLike", (MATRIX,), {}, np.zeros_like(MATRIX)),
    ("TopKV2", (MATRIX, 2), {}, [np.sort(MATRIX)[:, :1:-1], np.argsort(MATRIX)[:, :1:-1]]),
    ("UniqueV2", ([4, 2, 4], [0]), {}, [[4, 2], [0, 1, 0]]),
    ("DenseBincount", ([1, 1, 3], 5, np.zeros(0, np.int32)), {}, np.bincount([1, 1, 3], None, 5)),
    ("HistogramFixedWidth", (MATRIX, [0.0, 1.0], 4), {}, np.histogram(MATRIX, 4, (0, 1))[0]),
    ("SegmentMean", (MATRIX, SEGMENTS), {}, [MATRIX[:2].mean(0), MATRIX[2]]),
    ("UnsortedSegmentSum", (MATRIX, SEGMENTS, 2), {}, [MATRIX[:2].sum(0), MATRIX[2]]),
    ("SparseSegmentMean", (MATRIX, [2, 0, 1], SEGMENTS), {}, [MATRIX[[2, 0]].mean(0), MATRIX[1]]),
    ("ScatterNd", ([[2], [0]], MATRIX[:2], [3, 4]), {}, [MATRIX[1], 0 * MATRIX[0], MATRIX[0]]),
    (
        "TensorScatterAdd",
        (MATRIX, [[2], [0]], OTHER[:2]),
        {},
        MATRIX + np.stack([OTHER[1], 0 * OTHER[1], OTHER[0]]),
    ),
    ("DepthToSpace", (SMALL,), {"block_size": 2}, None),
    ("Qr", (SQUARE,), {}, None),
    ("FFT", (SIGNED + 0j,), {}, np.fft.fft(SIGNED)),
    ("RFFT", (SIGNED.astype(np.float32), [4]), {}, np.fft.rfft(SIGNED)),
    (
        "ResizeNearestNeighbor",
        (SMALL, [8, 8]),
        {},
        SMALL.repeat(2, 1).repeat(2, 2),
    ),
    (
        "SparseSoftmaxCrossEntropyWithLogits",
        (MATRIX, [0, 1, 3]),
        {},
        -np.log(softmax(MATRIX))[range(3), [0, 1, 3]],
    ),
    (
        "SoftmaxCrossEntropyWithLogits",
        (MATRIX, OTHER),
        {},
        -(np.log(softmax(MATRIX)) * OTHER).sum(1),
    ),
    (
        "FusedBatchNormV3",
        (IMAGE, SCALE, SCALE[::-1].copy(), np.zeros(0, np.float32), np.zeros(0, np.float32)),
        {"epsilon": 1e-4},
        normalised(IMAGE, (0, 1, 2)) * SCALE + SCALE[::-1],
    ),
    (
        "FakeQuantWithMinMaxArgs",
        (MATRIX,),
        {"min": 0.0, "max": 2.55},
        np.round(MATRIX * 100) / 100,
    ),
]


@pytest.mark.parametrize(("op_type", "values", "attributes", "expected"), OTHERS)
def test_other_inputs(
    op_type: str, values: tuple[Any, ...], attributes: dict[str, Any], expected: Array
) -> None:
    if op_type == "DepthToSpace":
        n, h, w, _ = SMALL.shape
        expected = SMALL.reshape(n, h, w, 2, 2, 1).transpose(0, 1, 3, 2, 4, 5).reshape(n, 8, 8, 1)
    results = run(op_type, *values, **attributes)
    if op_type == "Qr":
        q, r = results
        np.testing.assert_allclose(q.T @ q, np.eye(3), atol=1e-5)
        results, expected = q @ np.triu(r), SQUARE
    if isinstance(results, tuple) and not isinstance(expected, list):
        # The word speaks of the first result; the others are kept for the gradient.
        results = results[0]
    pairs = (
        zip(results, expected, strict=False)
        if isinstance(expected, list)
        else [(results, expected)]
    )
    for result, wanted in pairs:
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)


def test_what_words_are_not_held_to_their_meaning_here() -> None:
    run_here = {*of_words(UNARY, 1), *of_words(BINARY, 2), *(name for name, *_ in OTHERS)}
    words = {OP_TYPES.get(name, "conv2d") for name in run_here}
    missing = set(OP_TYPES.values()) - words
    assert missing == {
        # Random, or without a value.
        *("random", "empty", "constant"),
        # Into variables.
        *("assign", "assign_slice"),
        # Of other ranks than those run here.
        *("conv3d", "conv_transpose3d", "max_pool3d", "avg_pool3d"),
        # Long to write in NumPy.
        *("lstm", "gru", "ctc_loss", "unfold", "quantize", "dequantize", "space_to_depth"),
        *("svd", "eigh", "embedding", "sort"),
    }
