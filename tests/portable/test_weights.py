"""`context.weights` on TensorFlow: variables, in eager mode, functions and sessions."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# TensorFlow has no types.

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core import OpContext
from amanda_tools.prune import Prune, numpy_mask

V1: Any = tf.compat.v1


class Reads(amanda.Tool):
    """Notes which weights are read at which ops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[str]] = {}
        self.views: set[str] = set()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        reads = context.weights
        assert reads.supported
        for weight in reads.values():
            if reads.consumed:
                self.seen.setdefault(context.op_type, set()).add(weight.key)
            else:
                self.views.add(context.op_type)


def dense() -> Any:
    model = keras.Sequential(
        [keras.layers.Dense(3, name="first"), keras.layers.Dense(2, name="second")], name="net"
    )
    model.build((None, 4))
    return model


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_layers_read_variables_by_their_paths(mode: str) -> None:
    model, tool = dense(), Reads()
    call = model if mode == "eager" else tf.function(model)
    with amanda.apply(tool):
        call(tf.ones((1, 4)))
    assert tool.seen["MatMul"] == {":net/first/kernel", ":net/second/kernel"}
    assert {":net/first/bias", ":net/second/bias"} <= set.union(*tool.seen.values())
    assert "ReadVariableOp" not in tool.seen


@pytest.mark.slow
def test_gathers_and_slices_of_variables_are_readers() -> None:
    table = tf.Variable(tf.ones((5, 3)), name="table")

    @tf.function
    def program(indices: Any) -> Any:
        return tf.reduce_sum(tf.gather(table, indices)) + tf.reduce_sum(table[1:3])

    tool = Reads()
    with amanda.apply(tool):
        program(tf.constant([0, 2]))
        eager = tf.gather(table, [0, 2]) @ table[:3]
    assert eager.shape == (2, 3)
    assert tool.seen["ResourceGather"] == tool.seen["StridedSlice"] == {":table"}


def test_sessions_read_variables_by_their_names() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = V1.placeholder(tf.float32, (None, 4))
        w = V1.get_variable("w", (4, 3), use_resource=True)
        old = V1.get_variable("old", (3, 2), use_resource=False)
        y = (x @ w) @ old
        start = V1.global_variables_initializer()
    tool = Reads()
    with V1.Session(graph=graph) as session, amanda.apply(tool):
        session.run(start)
        session.run(y, {x: np.ones((1, 4), np.float32)})
    assert tool.seen["MatMul"] == {":w", ":old"}


@pytest.mark.slow
def test_variables_of_one_name_have_keys_of_their_own() -> None:
    one, two = (tf.Variable(tf.ones((2, 2)), name="same") for _ in range(2))
    tool = Reads()
    with amanda.apply(tool):
        tf.function(lambda x: x @ one @ two)(tf.ones((1, 2)))
    assert tool.seen["MatMul"] == {":same", ":same#2"}


def test_a_variable_has_one_mask_however_many_functions_read_it() -> None:
    model = dense()
    kernels = [variable.numpy() for variable in model.trainable_variables[::2]]
    x = tf.random.normal((2, 4), seed=1)
    tool = Prune(0.5)
    with amanda.apply(tool):
        outputs = [model(x), tf.function(model)(x), tf.function(lambda x: model(x) + 0)(x)]
    first, second = (kernel * numpy_mask(kernel, [1, 0], kernel.size // 2) for kernel in kernels)
    for output in outputs:
        np.testing.assert_allclose(output, x @ first @ second, rtol=1e-5)
    found = tool.result()
    assert [(one.name, one.pruned, one.elements) for one in found.weights] == [
        ("net/first/kernel", 6, 12),
        ("net/second/kernel", 3, 6),
    ]
    assert set(tool.masks.saved()) == {"net/first/kernel", "net/second/kernel"}
    assert (found.parameters, found.reached, found.unreached) == (18, 18, [])


@pytest.mark.slow
def test_fit_and_predict_count_a_weight_once() -> None:
    model = dense()
    model.compile(optimizer="sgd", loss="mse")
    x, y = np.ones((4, 4), np.float32), np.ones((4, 2), np.float32)
    tool = Prune(0.5)
    with amanda.apply(tool):
        model.fit(x, y, epochs=1, verbose=0)
        model.predict(x, verbose=0)
    found = tool.result()
    assert [one.name for one in found.weights] == ["net/first/kernel", "net/second/kernel"]
    assert found.reached == found.parameters == 18


@pytest.mark.slow
@pytest.mark.parametrize("eagerly", [False, True], ids=["function", "eagerly"])
def test_fit_and_predict_prune_what_layers_multiply_by(eagerly: bool) -> None:
    layers = keras.layers
    given = keras.Input((6,), dtype="int32")
    hidden = layers.GRU(8, return_sequences=True)(layers.Embedding(20, 8)(given))
    hidden = layers.Conv1D(6, 3)(
        layers.Bidirectional(layers.LSTM(4, return_sequences=True))(hidden)
    )
    model = keras.Model(given, layers.Dense(5)(layers.Flatten()(hidden)))
    model.compile(optimizer="sgd", loss="mse", run_eagerly=eagerly)
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 20, (8, 6)), generator.normal(size=(8, 5))
    tool = Prune(0.5)
    with amanda.apply(tool):
        model.fit(x, y, epochs=1, verbose=0)
        found = model.predict(x, verbose=0)
    kernels = [v for v in model.trainable_variables if "kernel" in v.name]
    masks = {name: np.asarray(mask) for name, mask in tool.masks.saved().items()}
    assert {v.path for v in kernels} == masks.keys()
    result = tool.result()
    # The table, and the two rows of biases of the GRU.
    left = {one.name.rpartition("/")[2]: one.elements for one in result.unreached}
    assert left == {"embeddings": 160, "bias": 48}
    assert result.reached == result.parameters - 160 - 48 == sum(m.size for m in masks.values())
    for variable in kernels:
        variable.assign(variable.numpy() * masks[variable.path])
    np.testing.assert_allclose(found, model.predict(x, verbose=0), atol=1e-6)


def weights_of_products() -> list[Any]:
    names = {"experts": (3, 6, 4), "kernel": (4, 6), "half": (6, 5), "heads": (6, 2, 3)}
    return [
        tf.Variable(tf.random.stateless_normal(shape, [1, n]), name=name)
        for n, (name, shape) in enumerate(names.items())
    ]


def products(x: Any, experts: Any, kernel: Any, half: Any, heads: Any) -> Any:
    """Return a number that depends on slices, a product of several axes, and a cast."""
    first = (x @ experts[1] + x @ experts[0, :, :4]) @ kernel
    second = tf.einsum("bi,ihd->bhd", first, heads)
    third = tf.matmul(tf.cast(x, tf.float16), tf.cast(half, tf.float16))
    return tf.reduce_sum(second**2) + tf.reduce_sum(tf.cast(third, tf.float32))


def mask_by_matrices(weight: Any) -> Any:
    return np.stack(
        [numpy_mask(m, [0, 1], m.size // 2) for m in weight.reshape(-1, *weight.shape[-2:])]
    )


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_slices_casts_and_products_of_several_axes_are_pruned(mode: str) -> None:
    weights, x = weights_of_products(), tf.random.stateless_normal((2, 6), [2, 0])
    masks = [mask_by_matrices(w.numpy()).reshape(w.shape) for w in weights]
    # That of all heads is one matrix, of which the first axis is summed over.
    masks[3] = numpy_mask(weights[3].numpy(), [0, 1, 2], 18)

    def gradients(weights: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = products(x, *weights)
        return loss, tape.gradient(loss, weights)

    expected = gradients([w * mask for w, mask in zip(weights, masks, strict=True)])
    tool = Prune(0.5)
    with amanda.apply(tool):
        run = gradients if mode == "eager" else tf.function(gradients)
        loss, found = run(weights)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    for gradient, there, mask in zip(found, expected[1], masks, strict=True):
        np.testing.assert_allclose(
            tf.convert_to_tensor(gradient), there * mask, rtol=1e-4, atol=1e-5
        )
    result = tool.result()
    assert [one.name for one in result.weights] == ["experts", "kernel", "heads", "half"]
    assert (result.unreached, result.skipped) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_attention_of_keras_is_pruned_in_full_and_mixed_precision(policy: str) -> None:
    keras.utils.set_random_seed(0)
    given = keras.Input((6, 8))
    hidden = keras.layers.MultiHeadAttention(2, 4, use_bias=False, dtype=policy)(given, given)
    hidden = keras.layers.EinsumDense("abc,cd->abd", (None, 5), dtype=policy)(hidden)
    model = keras.Model(given, keras.layers.Dense(2, dtype="float32")(hidden))
    x = np.random.default_rng(0).normal(size=(2, 6, 8)).astype(np.float32)
    tool = Prune(0.5)
    with amanda.apply(tool):
        pruned = [np.asarray(model(x)), model.predict(x, verbose=0)]
    found = tool.result()
    assert (found.unreached, found.skipped) == ([], [])
    assert found.reached == found.parameters == 4 * 64 + 40 + 10
    kept = {one.name: one for one in found.weights}
    for variable in model.trainable_variables:
        if variable.path in kept:
            mask = np.asarray(tool.masks.saved()[variable.path])
            assert (mask == 0).sum() == kept[variable.path].pruned == mask.size // 2
            variable.assign(variable * mask)
    for output in pruned:
        np.testing.assert_array_equal(output, model.predict(x, verbose=0))


@pytest.mark.slow
def test_what_is_not_reached_is_named() -> None:
    table = tf.Variable(tf.ones((5, 4)), name="table")
    kernel = tf.Variable(tf.ones((4, 2)), name="kernel")
    tool = Prune(0.5)
    with amanda.apply(tool):
        tf.function(lambda i: tf.gather(table, i) @ kernel)(tf.constant([0, 2]))
    found = tool.result()
    assert (found.parameters, found.reached) == (28, 8)
    assert [vars(one) for one in found.unreached] == [
        {"name": "table", "elements": 20, "reason": "read as an embedding"}
    ]
