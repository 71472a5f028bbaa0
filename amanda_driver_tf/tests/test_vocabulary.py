"""TensorFlow's operators in the common operator types: what contexts say of graphs written by hand.

The right words stand here, call by call; nothing is read from the tables under test. The contexts
are opened by the tests themselves, so that the words are tested apart from the interceptors;
`test_vocabulary_meaning.py` holds the words to what the operators compute. Long, since it is a list
of calls.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

import amanda
from amanda_core import OpContext, Session, Site
from amanda_core.interface.vocabulary import OP_TYPES as COMMON_TYPES
from amanda_driver_tf.operators.signature import grouped, signature_of
from amanda_driver_tf.plugin import amanda_driver_info
from amanda_driver_tf.vocabulary import BACKWARD_TYPES, OP_TYPES

Call = Callable[[], Any]
raw, v1 = tf.raw_ops, tf.compat.v1

#: Chosen by an attribute, so that no table has them.
BY_ATTRIBUTE = {"Conv", "CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"}
BY_FORWARD = {"CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3"}


@pytest.fixture
def session() -> Iterator[Session]:
    handle = amanda.attach(amanda.Tool())
    assert handle.session is not None
    yield handle.session
    handle.remove()


def opened(session: Session, op: Any, forward: OpContext | None = None, **facts: Any) -> OpContext:
    """Return the context of a node of a graph."""
    site = Site((op.name, id(op.graph)), op.type, "tensorflow/2.21.0/graph", op.name)
    if facts.get("backward"):
        return session.open(site, op, forward=forward, backward=True)
    signature = signature_of(op.type)
    assert signature is not None
    inputs = grouped(list(op.inputs), signature.lengths(op.get_attr))
    attrs = {attr: op.get_attr(attr) for attr in op.node_def.attr}
    return session.open(
        site, op, inputs, attrs, input_names=signature.names, constant=tf.get_static_value
    )


def contexts_of(session: Session, call: Call) -> list[OpContext]:
    """Return the contexts of the nodes that a call makes, without constants."""
    graph = tf.Graph()
    with amanda.disabled(), graph.as_default():
        call()
    return [opened(session, op) for op in graph.get_operations() if op.type != "Const"]


def last_context(session: Session, call: Call) -> OpContext:
    return contexts_of(session, call)[-1]


def backward_types_of(session: Session, call: Call) -> dict[str, str | None]:
    """Map op type to common type, for the backward ops of the last op of a call."""
    graph = tf.Graph()
    with amanda.disabled(), graph.as_default():
        xs, y = call()
        before = len(graph.get_operations())
        v1.gradients(y, xs)
    forward = opened(session, y.op)
    return {
        op.type: opened(session, op, forward, backward=True)["backward_type"]
        for op in graph.get_operations()[before:]
        # TensorFlow's own link, which it sets where both are in one graph.
        if op._original_op is y.op
    }


def image(channels: int = 4) -> Any:
    return v1.placeholder(tf.float32, [2, 6, 6, channels])


def volume() -> Any:
    return v1.placeholder(tf.float32, [1, 4, 4, 4, 2])


def matrix(rows: int = 3, columns: int = 4) -> Any:
    return v1.placeholder(tf.float32, [rows, columns])


def signal() -> Any:
    return v1.placeholder(tf.float32, [2, 6, 4])


def filters(*shape: int) -> Any:
    return v1.placeholder(tf.float32, shape)


CALLS: dict[str, tuple[Call, list[str | None]]] = {
    "dense": (
        lambda: tf.nn.relu(tf.nn.bias_add(matrix() @ filters(4, 5), filters(5))),
        [None, None, "matmul", None, "add", "relu"],
    ),
    "conv1d": (
        lambda: tf.nn.conv1d(signal(), filters(3, 4, 5), 1, "SAME"),
        [None, None, "unsqueeze", "unsqueeze", "conv2d", "squeeze"],
    ),
    "depthwise": (
        lambda: tf.nn.depthwise_conv2d(image(), filters(3, 3, 4, 2), [1, 1, 1, 1], "SAME"),
        [None, None, "conv2d"],
    ),
    "conv transposed": (
        lambda: tf.nn.conv2d_transpose(image(), filters(3, 3, 5, 4), [2, 12, 12, 5], 2),
        [None, None, "conv_transpose2d"],
    ),
    "any rank": (
        lambda: raw.Conv(
            input=volume(), filter=filters(2, 2, 2, 2, 3), strides=[1] * 5, padding="SAME"
        ),
        [None, None, "conv3d"],
    ),
    "norm": (
        lambda: raw.FusedBatchNormV3(
            x=image(), scale=filters(4), offset=filters(4), mean=filters(0), variance=filters(0)
        ),
        [None] * 5 + ["batch_norm"],
    ),
    "pools": (
        lambda: tf.nn.avg_pool2d(tf.nn.max_pool2d(image(), 2, 2, "SAME"), 2, 2, "SAME"),
        [None, "max_pool2d", "avg_pool2d"],
    ),
    "attention": (
        lambda: tf.nn.softmax(tf.matmul(signal(), signal(), transpose_b=True)) @ signal(),
        [None, None, "matmul", "softmax", None, "matmul"],
    ),
    "picking": (lambda: matrix()[0], [None, "slice"]),
    "rows of a table": (lambda: tf.gather(matrix(), [0, 2]), [None, "embedding"]),
    "columns": (lambda: tf.gather(matrix(), [0, 2], axis=1), [None, "slice"]),
    "of a stack": (lambda: tf.gather(signal(), [0, 1]), [None, "slice"]),
    "in each row": (
        lambda: tf.gather(matrix(), [[0], [1], [2]], axis=1, batch_dims=1),
        [None, "slice"],
    ),
    "loss": (
        lambda: tf.nn.sparse_softmax_cross_entropy_with_logits([0, 1, 2], matrix()),
        [None, "cross_entropy"],
    ),
    "recurrence": (
        lambda: raw.CudnnRNN(
            input=signal(), input_h=signal(), input_c=signal(), params=filters(9), rnn_mode="gru"
        ),
        [None] * 4 + ["gru"],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_words_of_the_operators_of_a_call(session: Session, name: str) -> None:
    call, words = CALLS[name]
    assert [context["type"] for context in contexts_of(session, call)] == words


def test_an_operator_without_a_word_has_none(session: Session) -> None:
    context = last_context(session, lambda: tf.math.digamma(matrix()))
    assert context["type"] is None
    assert not {"input_roles", "layout", "weight_layout"} & set(context)
    assert last_context(session, lambda: tf.shape(matrix()))["type"] is None


# Keys that go with the word.

#: Role -> what TensorFlow's own definitions call an argument of that role.
CALLED = {
    "input": {"input", "x", "t", "value", "features", "out_backprop"},
    "weight": {"filter", "scale", "gamma", "resource", "params", "data"},
    "bias": {"bias", "offset", "beta"},
    "indices": {"indices"},
    "segments": {"segment_ids"},
    "target": {"labels"},
    "left": {"a", "x"},
    "right": {"b", "y"},
    "mean": {"mean", "m"},
    "variance": {"variance", "v"},
    "output_shape": {"input_sizes"},
    "output_like": {"input"},
    "paddings": {"paddings"},
    "size": {"size"},
}


def test_roles_are_what_tensorflow_calls_the_arguments(session: Session) -> None:
    seen = 0
    for op_type in sorted({*OP_TYPES, *BY_ATTRIBUTE}):
        site = Site(op_type, op_type, "tensorflow/2.21.0/eager", op_type)
        context = session.open(site, None, None, {"strides": [1] * 4, "rnn_mode": "lstm"})
        signature = signature_of(op_type)
        roles = context.get("input_roles")
        if roles is None or signature is None:
            continue
        seen += 1
        assert len(roles) <= len(signature.names), op_type
        for role, argument in zip(roles, signature.names, strict=False):
            assert argument in CALLED[role], f"{op_type}: {argument} is no {role}"
    assert seen > 30


@pytest.mark.parametrize(
    ("call", "layout", "weight_layout"),
    [
        # 3 channels in, 4 out; a kernel of 5, (5, 6) or (5, 6, 7).
        (lambda: tf.nn.conv2d(image(3), filters(5, 6, 3, 4), 1, "SAME"), "NHWC", "HWIO"),
        (
            lambda: tf.nn.conv2d(
                filters(2, 3, 9, 9), filters(5, 6, 3, 4), 1, "SAME", data_format="NCHW"
            ),
            "NCHW",
            "HWIO",
        ),
        (
            lambda: tf.nn.conv3d(filters(1, 9, 9, 9, 3), filters(5, 6, 7, 3, 4), [1] * 5, "SAME"),
            "NDHWC",
            "DHWIO",
        ),
        (
            lambda: tf.nn.conv2d_transpose(image(3), filters(5, 6, 4, 3), [2, 6, 6, 4], 1),
            "NHWC",
            "HWOI",
        ),
        (
            lambda: tf.nn.conv3d_transpose(
                filters(1, 9, 9, 9, 3), filters(5, 6, 7, 4, 3), [1, 9, 9, 9, 4], 1
            ),
            "NDHWC",
            "DHWOI",
        ),
        (
            lambda: raw.Conv(
                input=filters(2, 3, 9, 9),
                filter=filters(5, 6, 3, 4),
                strides=[1] * 4,
                padding="SAME",
                data_format="CHANNELS_FIRST",
            ),
            "NCHW",
            "HWIO",
        ),
        (lambda: tf.matmul(matrix(2, 3), filters(3, 4)), None, "IO"),
        (lambda: tf.matmul(matrix(2, 3), filters(4, 3), transpose_b=True), None, "OI"),
        (lambda: raw.BatchMatMulV2(x=filters(5, 2, 3), y=filters(3, 4)), None, "IO"),
        (lambda: raw.BatchMatMulV2(x=filters(5, 2, 3), y=filters(5, 3, 4)), None, None),
        (lambda: tf.nn.max_pool3d(volume(), 2, 2, "SAME"), "NDHWC", None),
        (lambda: tf.nn.max_pool2d(image(), 2, 2, "SAME"), "NHWC", None),
        (lambda: tf.image.resize(image(), [3, 3]), "NHWC", None),
        (lambda: tf.nn.relu(image()), None, None),
    ],
)
def test_layouts_name_the_axes(
    session: Session, call: Call, layout: str | None, weight_layout: str | None
) -> None:
    context = last_context(session, call)
    assert context.get("layout") == layout
    assert context.get("weight_layout") == weight_layout
    roles = context.get("input_roles", ())
    if layout is not None:
        # The images above are square; 3 channels where there is a weight.
        position = roles.index("input") if roles else 0
        assert len(layout) == len(context.get_inputs()[position].shape)
        if weight_layout is not None:
            assert context.get_inputs()[position].shape[layout.index("C")] == 3
    if weight_layout is not None:
        position = roles.index("weight" if "weight" in roles else "right")
        axes = dict(zip(weight_layout, context.get_inputs()[position].shape, strict=True))
        assert (axes["I"], axes["O"]) == (3, 4)
        assert [axes[a] for a in "DHW" if a in axes] == [5, 6, 7][: len(axes) - 2]


def test_layout_of_a_depthwise_weight(session: Session) -> None:
    def call() -> None:
        tf.nn.depthwise_conv2d(image(3), filters(5, 6, 3, 2), [1, 1, 1, 1], "SAME")

    context = last_context(session, call)
    assert context["weight_layout"] == "HWIM"
    axes = dict(zip("HWIM", context.get_inputs()[1].shape, strict=True))
    assert axes["I"] == context.get_inputs()[0].shape[3]
    assert axes["I"] * axes["M"] == context.get_op().outputs[0].shape[3]


def test_attributes_come_as_bytes_or_text(session: Session) -> None:
    for number, given in enumerate((b"NCHW", "NCHW")):
        site = Site(number, "Conv2D", "tensorflow/2.21.0/eager", "Conv2D")
        assert session.open(site, None, None, {"data_format": given})["layout"] == "NCHW"


# Backward.


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda: (
                xs := [image(), filters(3, 3, 4, 5)],
                tf.nn.conv2d(*xs, strides=1, padding="SAME"),
            ),
            {"Conv2DBackpropInput": "conv2d", "Conv2DBackpropFilter": "conv2d", "ShapeN": None},
        ),
        (
            lambda: (
                xs := [image(), filters(3, 3, 5, 4)],
                tf.nn.conv2d_transpose(*xs, output_shape=[2, 6, 6, 5], strides=1),
            ),
            {"Conv2D": "conv_transpose2d", "Conv2DBackpropFilter": "conv_transpose2d"},
        ),
        (
            lambda: (
                xs := [image(), filters(3, 3, 4, 2)],
                tf.nn.depthwise_conv2d(*xs, strides=[1] * 4, padding="SAME"),
            ),
            {
                "DepthwiseConv2dNativeBackpropInput": "conv2d",
                "DepthwiseConv2dNativeBackpropFilter": "conv2d",
            },
        ),
        (lambda: (xs := [matrix(), filters(4, 5)], tf.matmul(*xs)), {"MatMul": "matmul"}),
        (
            lambda: (xs := [matrix(), filters(4)], tf.nn.bias_add(*xs)),
            {"BiasAddGrad": "add"},
        ),
        (
            # Of unknown shape.
            lambda: (xs := [matrix(), v1.placeholder(tf.float32)], xs[0] + xs[1]),
            {"Sum": "add", "BroadcastGradientArgs": None, "Shape": None},
        ),
        (lambda: (xs := [matrix()], tf.nn.relu(xs[0])), {"ReluGrad": "relu"}),
        (lambda: (xs := [matrix()], tf.nn.leaky_relu(xs[0])), {"LeakyReluGrad": "leaky_relu"}),
        (lambda: (xs := [matrix()], tf.tanh(xs[0])), {"TanhGrad": "tanh"}),
        (lambda: (xs := [matrix()], tf.nn.softmax(xs[0])), {"Mul": "softmax", "Sub": "softmax"}),
        (
            lambda: (xs := [image()], tf.nn.max_pool2d(xs[0], 2, 2, "SAME")),
            {"MaxPoolGrad": "max_pool2d"},
        ),
        (lambda: (xs := [matrix()], tf.transpose(xs[0])), {"Transpose": "transpose"}),
        (lambda: (xs := [matrix()], xs[0][:2]), {"StridedSliceGrad": "slice"}),
        (lambda: (xs := [matrix()], tf.square(xs[0])), {"Mul": "square"}),
        (
            lambda: (xs := [signal()], tf.einsum("bij,kj->bik", xs[0], tf.ones([5, 4]))),
            {"Einsum": "einsum"},
        ),
        (lambda: (xs := [matrix()], tf.stack([xs[0], xs[0]])), {"Unpack": "stack"}),
    ],
)
def test_words_of_backward_operators(
    session: Session, call: Call, expected: dict[str, str | None]
) -> None:
    words = backward_types_of(session, call)
    for op_type, word in expected.items():
        assert words[op_type] == (None if word is None else f"{word}_backward"), words


def test_batch_norms_backward_is_one_operator(session: Session) -> None:
    def call() -> Any:
        xs = [image(), filters(4), filters(4)]
        return xs, tf.compat.v1.nn.fused_batch_norm(*xs)[0]

    words = backward_types_of(session, call)
    assert {t: w for t, w in words.items() if w is not None} == {
        "FusedBatchNormGradV3": "batch_norm_backward"
    }


def test_a_gradient_without_a_forward_op(session: Session) -> None:
    for number, (op_type, word) in enumerate(
        [("Conv2DBackpropFilter", "conv2d_backward"), ("AddN", None), ("Conv2D", None)]
    ):
        site = Site(number, op_type, "tensorflow/2.21.0/graph", op_type)
        assert session.open(site, None, backward=True)["backward_type"] == word


@pytest.mark.parametrize("other", ["my_word", None, 7, ["conv2d"]])
def test_backward_words_do_not_depend_on_what_a_rule_wrote(session: Session, other: object) -> None:
    graph = tf.Graph()
    with amanda.disabled(), graph.as_default():
        y = tf.nn.conv2d_transpose(image(), filters(3, 3, 5, 4), [2, 6, 6, 5], 1)
    forward = opened(session, y.op)
    forward["type"] = other
    site = Site(0, "Conv2D", "tensorflow/2.21.0/graph", "Conv2D")
    backward = session.open(site, None, forward=forward, backward=True)
    assert backward["backward_type"] == "conv_transpose2d_backward"


# Real models.


def applications(name: str) -> Any:
    build = getattr(keras.applications, name)
    return build(weights=None, input_shape=(32, 32, 3), classes=4)


def layers() -> Any:
    """Run layers that the applications do not have."""
    of = keras.layers
    x = y = keras.Input((12,), dtype="int32")
    y = of.Embedding(9, 8)(y)
    y = of.LayerNormalization()(of.MultiHeadAttention(2, 4)(y, y) + y)
    y = of.Bidirectional(of.LSTM(4, return_sequences=True))(of.GRU(8, return_sequences=True)(y))
    y = of.Conv1DTranspose(4, 3)(of.Conv1D(4, 3)(of.UpSampling1D(2)(y)))
    y = of.GroupNormalization(2)(of.Reshape((-1, 2, 4))(y))
    y = of.SeparableConv2D(4, 3, padding="same")(of.Conv2DTranspose(4, 3)(y))
    y = of.PReLU()(of.UnitNormalization()(of.GaussianNoise(0.1)(of.SpatialDropout2D(0.1)(y))))
    return keras.Model(x, of.Dense(3, activation="gelu")(of.GlobalMaxPooling2D()(y)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: applications("MobileNetV3Small"), {"conv2d", "mean", "rsqrt", "softmax"}),
        (lambda: applications("VGG16"), {"conv2d", "max_pool2d", "matmul", "relu"}),
        (
            layers,
            {"embedding", "einsum", "softmax", "conv2d", "conv_transpose2d", "tanh", "sigmoid"}
            | {"random", "max", "where", "reshape", "concat", "split", "flip"},
        ),
    ],
    ids=["MobileNetV3Small", "VGG16", "layers"],
)
def test_the_operators_of_models_have_words(
    session: Session, build: Callable[[], Any], expected: set[str]
) -> None:
    with amanda.disabled():
        model = build()
        spec = tf.TensorSpec([2, *model.input_shape[1:]], model.input.dtype)
        graph = tf.function(lambda x: model(x, training=True)).get_concrete_function(spec).graph
    bodies = [graph, *(f.graph for f in graph._functions.values() if hasattr(f, "graph"))]
    words: set[str] = set()
    missing: set[str] = set()
    for op in (op for body in bodies for op in body.get_operations()):
        word = opened(session, op)["type"] if signature_of(op.type) is not None else None
        (missing if word is None else words).add(word or op.type)
    assert words >= expected, words
    # Releases write gelu by the one or the other.
    assert build is not layers or words & {"erf", "erfc"}
    reasons = without_words()
    # Of what computes something: half of a variance.
    plain = {"variables", "control flow", "state", "sizes"}
    assert {t for t in missing if not reasons[t].startswith(tuple(plain))} <= {"SquaredDifference"}


# The tables.


#: Why TensorFlow has no operator for these words: Python functions that make several of them, or a
#: layer of Keras.
UNUSED = {
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast"),
    *("all_to_all", "send", "recv", "barrier"),
    *("accumulate_grad", "reduce_grad", "outer", "grouped_matmul", "bilinear", "linear"),
    "weight_norm",
    *("conv_transpose1d", "fold", "attention", "dropout"),
    *("layer_norm", "group_norm", "instance_norm", "rms_norm"),
    *("prelu", "rrelu", "threshold", "celu", "gelu", "glu", "silu", "mish", "hardtanh"),
    *("hardswish", "hardsigmoid", "hardshrink", "softshrink", "log_sigmoid"),
    *(
        "max_pool1d",
        "avg_pool1d",
        *(f"adaptive_{k}_pool{r}d" for k in ("avg", "max") for r in "123"),
    ),
    *("log2", "log10", "trunc", "lerp", "masked_fill", "logical_xor"),
    *("var", "std", "logsumexp", "argsort", "count_nonzero", "gather", "repeat", "tril", "triu"),
    *("grid_sample", "affine_grid", "channel_shuffle", "eye", "meshgrid"),
    *("nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss"),
    *("l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "cosine_similarity", "cdist"),
}
#: Given by an attribute of an op type.
ATTRIBUTES = {"conv1d", "rnn"}


def without_words() -> dict[str, str]:
    """Return op type -> reason, from the list beside this file."""
    reasons: dict[str, str] = {}
    reason = ""
    text = (Path(__file__).parent / "operators_without_words.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("["):
            reason = line.strip("[]")
        for name in () if line.startswith("[") else line.split():
            assert name not in reasons, f"{name} is listed twice"
            reasons[name] = reason
    return reasons


def test_every_operator_has_a_word_or_a_reason() -> None:
    known = {*OP_TYPES, *BACKWARD_TYPES, *BY_ATTRIBUTE, *BY_FORWARD}
    reasons = without_words()
    assert not known & set(reasons)
    new = {name for name in dir(raw) if not name.startswith("_")} - known - set(reasons)
    assert not new, "new operators of this release: give them a word, or a reason to have none"


@pytest.mark.skipif(
    tuple(map(int, tf.__version__.split(".")[:2])) < (2, 21),
    reason="the vocabulary has names of TensorFlow 2.21",
)
def test_every_name_is_tensorflows() -> None:
    names = {*OP_TYPES, *BACKWARD_TYPES, *BY_ATTRIBUTE, *BY_FORWARD, *without_words()}
    assert not [name for name in names if op_def_registry.get(name) is None]


def test_every_word_used_is_a_common_word() -> None:
    assert set(OP_TYPES.values()) <= set(COMMON_TYPES)
    assert all(word.endswith("_backward") for word in BACKWARD_TYPES.values())
    assert {word.removesuffix("_backward") for word in BACKWARD_TYPES.values()} <= set(COMMON_TYPES)


def test_every_word_is_used() -> None:
    assert set(COMMON_TYPES) - set(OP_TYPES.values()) - ATTRIBUTES == UNUSED


def test_the_driver_tells_its_vocabulary() -> None:
    vocabulary = amanda_driver_info().vocabulary
    assert vocabulary["Conv2D"] == "conv2d"
    assert vocabulary["BatchMatMulV2"] == vocabulary["MatMul"] == "matmul"
    assert vocabulary["Conv2DBackpropFilter"] == "conv2d_backward"


def test_the_words_need_no_tensorflow() -> None:
    program = "import sys, amanda_driver_tf.plugin; print('tensorflow' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_contexts_of_other_frameworks_are_left_alone(session: Session) -> None:
    site = Site("key", "Conv2D", "elsewhere/1/eager", "Conv2D")
    assert session.open(site, None)["type"] is None
