"""Rewriting in TensorFlow's modes: convolutions followed by normalizations, and attention.

A little over 400 lines: one subject, in three modes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_tools.kit.tensors.types import TensorType
from amanda_tools.rewriting import Input, Operator, Rewrite, Rule, attention, graphs

v1 = tf.compat.v1
_random = np.random.default_rng(0)
X = _random.normal(size=(2, 6, 6, 3)).astype(np.float32)
KERNEL, SCALE, SHIFT, MEAN = (
    _random.normal(size=shape).astype(np.float32) for shape in ((3, 3, 3, 4), 4, 4, 4)
)
VARIANCE = np.abs(_random.normal(size=4)).astype(np.float32) + 0.1


def network(
    x: Any, kernel: Any, training: bool = False, beside: bool = False, written: str = ""
) -> Any:
    if written:
        return written_out(x, kernel, written)
    value = tf.nn.conv2d(x, kernel, 2, "SAME")
    statistics = () if training else (MEAN, VARIANCE)
    normal, _, _ = v1.nn.fused_batch_norm(
        value, SCALE, SHIFT, *statistics, epsilon=1e-3, is_training=training
    )
    return tf.nn.relu(normal) + (value if beside else 0.0)


def written_out(x: Any, kernel: Any, how: str) -> Any:
    """Normalize as Keras does: with a factor and a term."""
    if how == "depthwise":
        # Four channels of the output: two for each of two channels.
        value = tf.nn.depthwise_conv2d(x[..., :2], kernel[:, :, :2, :2], [1, 2, 2, 1], "SAME")
    elif how == "explicit":
        value = tf.nn.conv2d(x, kernel, 2, [[0, 0], [2, 1], [0, 1], [0, 0]])
    else:
        value = tf.nn.conv2d(x, kernel, 2, "SAME", dilations=1)
    if how == "bias":
        value = tf.nn.bias_add(value, SHIFT * 3)
    scale, shift = (None if how == "plain" else SCALE), SHIFT
    shape = [1, 1, 1, 4] if how == "shaped" else [4]
    statistics = (tf.reshape(one, shape) for one in (MEAN, VARIANCE))
    return tf.nn.relu(tf.nn.batch_normalization(value, *statistics, shift, scale, 1e-3))


def run_eager(tool: Rewrite, **options: Any) -> list[Any]:
    kernel, found = tf.Variable(KERNEL), []
    with amanda.apply(tool):
        for _ in range(3):
            with tf.GradientTape() as tape:
                output = network(tf.constant(X), kernel, **options)
                total = tf.reduce_sum(output * output)
            found.append((output.numpy(), tape.gradient(total, kernel).numpy()))
            amanda.step()
    return found


def run_function(tool: Rewrite, **options: Any) -> list[Any]:
    kernel, found = tf.Variable(KERNEL), []
    function = tf.function(lambda x: network(x, kernel, **options))
    with amanda.apply(tool):
        for _ in range(3):
            with tf.GradientTape() as tape:
                output = function(tf.constant(X))
                total = tf.reduce_sum(output * output)
            found.append((output.numpy(), tape.gradient(total, kernel).numpy()))
            amanda.step()  # A call whose gradients are requested does not end a match.
    return found


def run_graph(tool: Rewrite, **options: Any) -> list[Any]:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, X.shape)
        kernel = v1.get_variable("kernel", initializer=KERNEL, use_resource=True)
        output = network(x, kernel, **options)
    found = []
    with v1.Session(graph=graph) as session:
        with graph.as_default():
            session.run(v1.global_variables_initializer())
        with amanda.apply(tool):
            found = [(session.run(output, {x: X}), None) for _ in range(3)]
    return found


RUNS: dict[str, Callable[..., list[Any]]] = {
    "eager": run_eager,
    "function": run_function,
    "graph": run_graph,
}
modes = pytest.mark.parametrize("mode", list(RUNS))


def expected(**options: Any) -> tuple[Any, Any]:
    kernel = tf.Variable(KERNEL)
    with tf.GradientTape() as tape:
        output = network(tf.constant(X), kernel, **options)
        total = tf.reduce_sum(output * output)
    return output.numpy(), tape.gradient(total, kernel).numpy()


def assert_same(found: list[Any], **options: Any) -> None:
    output, gradient = expected(**options)
    for one, other in found:
        np.testing.assert_allclose(one, output, rtol=1e-5, atol=1e-5)
        if other is not None:
            np.testing.assert_allclose(other, gradient, rtol=1e-4, atol=1e-3)


@modes
def test_folding(mode: str) -> None:
    tool = Rewrite(rules=["conv_bn"], until="step")
    assert_same(RUNS[mode](tool))
    (match,) = tool.result().matches
    assert (match.refused, match.fallbacks) == (None, {})
    # A run in eager mode, a graph elsewhere.
    assert match.rewritten == (2 if mode == "eager" else match.rewritten)
    assert match.rewritten >= 1


@modes
def test_a_value_that_is_used_elsewhere(mode: str) -> None:
    tool = Rewrite(rules=["conv_bn"], until="step")
    assert_same(RUNS[mode](tool, beside=True), beside=True)
    (match,) = tool.result().matches
    assert "is used by" in str(match.refused)
    assert match.rewritten == 0


@modes
def test_training_is_left(mode: str) -> None:
    tool = Rewrite(rules=["conv_bn"], until="step")
    assert_same(RUNS[mode](tool, training=True), training=True)
    (match,) = tool.result().matches
    assert match.rewritten == 0
    assert match.refused is not None or match.fallbacks == {"the normalisation is in training": 2}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["scaled", "plain", "bias", "explicit", "shaped", "depthwise"])
@modes
def test_folding_of_written_out_normalisation(mode: str, how: str) -> None:
    tool = Rewrite(rules=["conv_bn"], until="step")
    assert_same(RUNS[mode](tool, written=how), written=how)
    (match,) = tool.result().matches
    assert (match.rule, match.refused, match.fallbacks) == ("conv_bn", None, {})
    assert match.rewritten >= 1
    assert len(match.ops) == (4 if how == "bias" else 3)


@pytest.mark.parametrize("shape", [(2, 3, 3, 4), (1,), (3, 4)])
def test_a_factor_that_is_none_of_channels_is_left(shape: tuple[int, ...]) -> None:
    gate = _random.normal(size=shape).astype(np.float32)

    def gated(x: Any) -> Any:
        return tf.nn.conv2d(x, KERNEL, 2, "SAME") * gate + SHIFT

    tool, expected = Rewrite(rules=["conv_bn"]), gated(X).numpy()
    function = tf.function(gated)
    with amanda.apply(tool):
        for _ in range(3):
            np.testing.assert_allclose(function(X).numpy(), expected, rtol=1e-5, atol=1e-6)
    (match,) = tool.result().matches
    assert match.refused is None
    assert match.fallbacks == {"its factor is not one for each channel": 1}
    assert match.rewritten == 0


def drawn(model: Any) -> None:
    """Give all weights of a model values that do not cancel."""
    for variable in model.weights:
        value = np.abs(_random.normal(size=variable.shape)) * 0.3 + 0.1
        sign = -1.0 if variable.name in ("kernel", "beta") else 1.0
        variable.assign(np.where(_random.random(variable.shape) < 0.5, value, sign * value))


def test_keras_layers_with_gradients() -> None:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3, use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.DepthwiseConv2D(3, depth_multiplier=2),
            keras.layers.BatchNormalization(center=False),
            keras.layers.Conv2D(4, 1, strides=2),
            keras.layers.BatchNormalization(scale=False, axis=3),
            keras.layers.BatchNormalization(),
        ]
    )
    drawn(model)
    x = tf.constant(_random.normal(size=(2, 8, 8, 3)).astype(np.float32))

    def run(program: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            output = program(x)
            total = tf.reduce_mean(output * output)
        gradients = tape.gradient(total, model.trainable_variables)
        return [output.numpy(), *(gradient.numpy() for gradient in gradients)]

    tool = Rewrite(rules=["conv_bn"], until="step")
    function = tf.function(lambda x: model(x, training=False))
    for _ in range(3):
        expected = run(lambda x: model(x, training=False))
        with amanda.apply(tool):
            found = run(function)
            amanda.step()
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5 * np.abs(other).max())
        drawn(model)  # Nothing of the weights was taken into the graph.
    matches = tool.result().matches
    assert [len(match.ops) for match in matches] == [3, 4, 4]
    assert all(match.rewritten and not match.fallbacks for match in matches)


@pytest.mark.slow
def test_a_keras_application() -> None:
    keras.utils.set_random_seed(0)
    model = keras.applications.MobileNetV2(
        (32, 32, 3), weights=None, classes=10, classifier_activation=None
    )
    norms = [layer for layer in model.layers if "BatchNorm" in type(layer).__name__]
    for layer in norms:
        for variable in layer.weights:
            variable.assign(variable.numpy() + 0.1 * np.abs(_random.normal(size=variable.shape)))
    x = tf.constant(_random.normal(size=(2, 32, 32, 3)).astype(np.float32))
    plain = tf.function(lambda x: model(x, training=False))(x).numpy()
    tool = Rewrite(rules=["conv_bn"])
    function = tf.function(lambda x: model(x, training=False))
    with amanda.apply(tool):
        outputs = [function(x).numpy() for _ in range(2)]
    for output in outputs:
        np.testing.assert_allclose(output, plain, rtol=1e-5, atol=1e-5 * np.abs(plain).max())
    assert outputs[1].tobytes() != outputs[0].tobytes()  # It is computed otherwise.
    matches = tool.result().matches
    assert len(matches) == len(norms)
    assert all(match.rewritten == 1 and match.refused is None for match in matches)


# Attention.


def fused(query: Any, key: Any, value: Any, *, scale: Any, mask: Any) -> Any:
    """Compute attention with other operators than Keras'."""
    scores = tf.einsum("bqnh,bknh->bnqk", query * scale, key)
    if mask is not None:
        scores += tf.where(mask, 0.0, tf.constant(-1e9, scores.dtype))
    weights = tf.exp(scores - tf.reduce_logsumexp(scores, -1, keepdims=True))
    return tf.einsum("bnqk,bknh->bqnh", weights, value)


QUERY = tf.constant(_random.normal(size=(2, 5, 8)).astype(np.float32))
OTHER = tf.constant(_random.normal(size=(2, 7, 8)).astype(np.float32))
MASK = _random.random((2, 5, 7)) > 0.3
MASK[..., 0] = True


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"use_causal_mask": True}, {"attention_mask": MASK}])
@pytest.mark.parametrize("shapes", ["known", "unknown"])
def test_attention_of_keras_by_one_function(options: dict[str, Any], shapes: str) -> None:
    layer = keras.layers.MultiHeadAttention(2, 4, value_dim=3)

    def attend(query: Any, other: Any) -> Any:
        return layer(query, other, **options)

    attend(QUERY, OTHER)

    def run(program: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch([QUERY, OTHER])
            output = program(QUERY, OTHER)
            total = tf.reduce_sum(output * output)
        gradients = tape.gradient(total, [QUERY, OTHER, *layer.trainable_variables])
        return [output.numpy(), *(gradient.numpy() for gradient in gradients)]

    calls: list[Any] = []

    def counted(query: Any, key: Any, value: Any, *, scale: Any, mask: Any) -> Any:
        calls.append((float(scale), mask is not None))
        return fused(query, key, value, scale=scale, mask=mask)

    expected = run(attend)
    tool = Rewrite(until="step")
    tool.add(attention(counted))
    spec = [tf.TensorSpec([None, None, 8])] * 2 if shapes == "unknown" else None
    function = tf.function(attend, input_signature=spec)
    with amanda.apply(tool):
        for _ in range(3):
            for one, other in zip(run(function), expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
            amanda.step()
    (match,) = tool.result().matches
    if shapes == "unknown" and options:
        # A mask of unknown size asks for the shape of the scores.
        assert "/Shape, too" in str(match.refused)
        assert (calls, match.rewritten) == ([], 0)
        return
    assert (match.refused, match.fallbacks, match.rewritten) == (None, {}, 1)
    assert set(calls) == {(0.5, bool(options))}


@pytest.mark.parametrize("mode", ["function", "graph"])
def test_graphs_run_what_a_rule_says(mode: str) -> None:
    convolution = Operator(("conv2d",), {0: Input("x")}, "conv")
    rule = Rule(
        "zeros",
        Operator(("batch_norm",), {0: convolution}, "norm"),
        lambda match: None,
        head=lambda constants: lambda x, kernel: tf.nn.conv2d(x, kernel * 0.0, 2, "SAME"),
    )
    tool = Rewrite(until="step")
    tool.add(rule)
    found = [output for output, _ in RUNS[mode](tool)]
    assert found[0].any()
    assert not found[-1].any()


def test_attention_in_a_session_and_eagerly() -> None:
    keys = tf.reshape(OTHER, [2, 7, 2, 4])

    def attend(query: Any) -> Any:
        query = tf.reshape(query, [2, 5, 2, 4])
        scores = tf.einsum("BTNH,BSNH->BNTS", query, keys) / 2.0
        return tf.einsum("BNTS,BSNH->BTNH", tf.nn.softmax(scores), keys * 1.0)

    expected = attend(QUERY).numpy()
    rule = attention(
        lambda query, key, value, scale, mask: (
            fused(query, key, value, scale=scale, mask=mask) * 2.0
        )
    )
    keys = keys.numpy()
    tool = Rewrite(until="step")
    tool.add(rule)
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, QUERY.shape)
        output = attend(x)
    with v1.Session(graph=graph) as session, amanda.apply(tool):
        found = [session.run(output, {x: QUERY.numpy()}) for _ in range(3)]
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[-1], expected * 2, rtol=1e-5, atol=1e-6)
    tool = Rewrite(until="step")
    tool.add(rule)
    with amanda.apply(tool):
        for factor in (1, 2):
            np.testing.assert_allclose(attend(QUERY), expected * factor, rtol=1e-5, atol=1e-6)
            amanda.step()


def test_what_cannot_be_handed_on_is_refused() -> None:
    inner = Operator(("Exp",), {0: Input("x")}, "inner")
    rule = Rule(
        "double", Operator(("Tanh",), {0: inner}, "outer"), lambda match: [match.inputs["x"]]
    )
    half, shapeless = Rewrite(), Rewrite()
    for tool, spec, reason in (
        (half, tf.TensorSpec([2], tf.float16), "returns float16, which cannot carry"),
        (shapeless, tf.TensorSpec(None, tf.float32), "the rank of an input"),
    ):
        tool.add(rule)
        function = tf.function(lambda x: tf.tanh(tf.exp(x)), input_signature=[spec])
        x = tf.constant([0.5, -1.0], spec.dtype)
        with amanda.apply(tool):
            for _ in range(2):
                np.testing.assert_array_equal(function(x), tf.tanh(tf.exp(x)))
        (match,) = tool.result().matches
        assert reason in str(match.refused)


def test_what_is_handed_on_is_exact() -> None:
    big = tf.constant([[2.0**60, np.nan], [-0.0, np.inf]], tf.float32)
    flags, vector = tf.constant([True, False, True]), tf.range(5.0)
    kinds = [
        TensorType("float32", (2, None)),
        TensorType("bool", (3,)),
        TensorType("float32", (5,)),
    ]
    packed = graphs.packed([big, flags, vector])
    for one, other in zip(graphs.unpacked(packed, kinds), (big, flags, vector), strict=True):
        assert one.dtype == other.dtype
        assert one.numpy().tobytes() == other.numpy().tobytes()
    # A length that single precision does not hold.
    long = tf.zeros([(1 << 24) + 1], tf.float32)
    [again] = graphs.unpacked(graphs.packed([long]), [TensorType("float32", (None,))])
    assert again.shape == long.shape


@pytest.mark.parametrize("in_function", [False, True])
def test_rules_for_pytorch_leave_tensorflow(in_function: bool) -> None:
    def attend(x: Any) -> Any:
        return tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True) * 0.5), x)

    expected = attend(QUERY).numpy()
    tool = Rewrite(rules=["sdpa", "softmax"], until="step")
    program = tf.function(attend) if in_function else attend
    with amanda.apply(tool):
        for _ in range(2):
            np.testing.assert_allclose(program(QUERY), expected, rtol=1e-6)
            amanda.step()
    assert tool.result().matches == []
