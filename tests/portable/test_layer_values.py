"""`capture` and `steer` by module on Keras, compared with Keras' own models of intermediate layers
and with models in which the edit is a layer.
"""

# mypy: allow-untyped-calls
# Keras has no types.

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.errors import UnsupportedError
from amanda_tools.capture import Capture, CaptureResult
from amanda_tools.steer import Steer

layers = keras.layers
X = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)

MODES: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "eager": lambda model: model,
    "function": tf.function,
    "predict": lambda model: lambda x: model.predict(x, verbose=0),
}


class Straight(keras.layers.Layer):  # type: ignore[misc]  # No types.
    """Scales in the forward pass and passes gradients on."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def call(self, x: Any) -> Any:
        return x + tf.stop_gradient(self.factor * x - x)


class Pair(keras.layers.Layer):  # type: ignore[misc]  # No types.
    """Returns two tensors, of which it reads the first one itself."""

    def __init__(self, kind: str) -> None:
        super().__init__(name="pair")
        self.kind = kind
        self.a, self.b = layers.Dense(4, name="a"), layers.Dense(4, name="b")

    def build(self, shape: Any) -> None:
        self.a.build(shape)
        self.b.build(shape)

    def call(self, x: Any) -> Any:
        first = self.a(x)
        second = self.b(first) + first
        return {"y": first, "b": second} if self.kind == "dict" else (first, second)


class Net(keras.Model):  # type: ignore[misc]  # No types.
    """Reads its input beside the pair; `by_hand` edits what the pair takes or returns."""

    def __init__(self, kind: str, by_hand: str = "") -> None:
        super().__init__(name="net")
        self.pair, self.out = Pair(kind), layers.Dense(3, name="out")
        self.straight, self.by_hand = Straight(2.5), by_hand

    def build(self, shape: Any) -> None:
        self.pair.build(shape)
        self.out.build(shape)

    def call(self, x: Any) -> Any:
        result = self.pair(self.straight(x) if self.by_hand == "inputs" else x)
        first, second = result.values() if isinstance(result, dict) else result
        if self.by_hand == "outputs":
            first = self.straight(first)
        return self.out(tf.tanh(first) * second) + tf.reduce_sum(x, -1, keepdims=True)


def made(kind: str, by_hand: str = "", eagerly: bool = False) -> Any:
    keras.utils.set_random_seed(0)
    net = Net(kind, by_hand)
    net(X)
    weights = np.random.default_rng(2)
    net.set_weights([weights.normal(size=w.shape) / 2 for w in net.get_weights()])
    net.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=eagerly)
    return net


def functional() -> tuple[Any, dict[str, Any]]:
    """Return a model that calls a layer twice and has a model in it, and Keras' own models of what
    its modules return.
    """
    keras.utils.set_random_seed(0)
    given = keras.Input((4,))
    twice = layers.Dense(4, name="twice")
    inner = keras.Sequential(
        [layers.Dense(3, "relu", name="a"), layers.Dense(4, name="b")], name="inner"
    )
    first = twice(given)
    second = twice(first)
    nested = inner(second)
    dropped = layers.Dropout(0.5, name="drop")(nested)
    out = layers.Dense(2, name="out")(dropped)
    values = {
        "net/twice": [first, second],
        "net/inner/a": [keras.Model(inner.inputs, inner.layers[0].output)(second)],
        "net/inner": [nested],
        "net/drop": [nested],
        "net/out": [out],
        "net": [out],
    }
    models = {path: keras.Model(given, several) for path, several in values.items()}
    return keras.Model(given, out, name="net"), models


def values_of(found: CaptureResult, path: str, what: str = "output") -> list[Any]:
    return [found.read(value) for value in found.of(path, what)]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("mode", list(MODES))
def test_captured_values_are_those_of_keras(mode: str, traced: bool) -> None:
    model, models = functional()
    call = MODES[mode](model)
    plain = np.asarray(call(X) if traced else model(X))
    capture = Capture(modules=["net", "net/*"], values=["inputs", "outputs"])
    with amanda.apply(capture):
        np.testing.assert_allclose(call(X), plain, rtol=1e-6)
    found = capture.result()
    assert not found.notes
    assert not found.problems
    for path, own in models.items():
        expected = [np.asarray(value) for value in tf.nest.flatten(own(X))]
        for value, one in zip(values_of(found, path), expected, strict=True):
            np.testing.assert_allclose(value, one, rtol=1e-5, atol=1e-6)
    taken = values_of(found, "net/twice", "input")
    np.testing.assert_array_equal(taken[0], X)
    np.testing.assert_array_equal(taken[1], values_of(found, "net/twice")[0])
    np.testing.assert_array_equal(call(X), plain)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("path", ["net/twice", "net/inner", "net/inner/a", "net/drop", "net/out"])
def test_a_steered_layer_is_a_layer_edited_by_hand(mode: str, path: str) -> None:
    model, _ = functional()
    twice, inner, _, out = (one for one in model.layers if not isinstance(one, layers.InputLayer))
    vector = [1.0, -2.0, 3.0, -4.0]

    def edited(name: str, value: Any) -> Any:
        return value + vector[: value.shape[-1]] if path == name else value

    hidden = edited("net/twice", twice(edited("net/twice", twice(X))))
    hidden = inner.layers[1](edited("net/inner/a", inner.layers[0](hidden)))
    expected = edited("net/out", out(edited("net/drop", edited("net/inner", hidden))))
    width = {"net/inner/a": 3, "net/out": 2}.get(path, 4)
    tool = Steer("add", vector=vector[:width], modules=[path])
    with amanda.apply(tool):
        np.testing.assert_allclose(MODES[mode](model)(X), expected, rtol=1e-4, atol=1e-5)
    assert tool.result().changed == (2 if path == "net/twice" else 1)


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("value", ["outputs", "inputs"])
@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_training_is_that_of_a_model_edited_by_hand(kind: str, value: Any, eagerly: bool) -> None:
    by_hand, net = made(kind, value, eagerly), made(kind, "", eagerly)
    options: dict[str, Any] = {"batch_size": 2, "shuffle": False, "verbose": 0}
    expected = by_hand.fit(X, Y, **options).history["loss"]
    tool = Steer("scale", factor=2.5, modules=["net/pair"], value=value)
    with amanda.apply(tool):
        assert net.fit(X, Y, **options).history["loss"] == pytest.approx(expected, rel=1e-4)
        predicted = net.predict(X, verbose=0)
    np.testing.assert_allclose(predicted, by_hand.predict(X, verbose=0), rtol=1e-3, atol=1e-4)
    for mine, one in zip(net.get_weights(), by_hand.get_weights(), strict=True):
        np.testing.assert_allclose(mine, one, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("value", ["outputs", "inputs"])
def test_gradients_outside_of_a_function_are_those_of_the_edited_model(value: Any) -> None:
    by_hand, net = made("tuple", value), made("tuple")

    def gradients(model: Any, function: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(X) ** 2)
        return [loss, *tape.gradient(loss, model.trainable_variables)]

    expected, function = gradients(by_hand, tf.function(by_hand)), tf.function(net)
    gradients(net, function)  # Traced before the tool is applied.
    with amanda.apply(Steer("scale", factor=2.5, modules=["net/pair"], value=value)):
        found = gradients(net, function)
    for mine, one in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, one, rtol=1e-4, atol=1e-4)


def test_layers_in_loops_of_functions_are_captured_and_steered() -> None:
    class Repeated(keras.layers.Layer):  # type: ignore[misc]  # No types.
        def __init__(self) -> None:
            super().__init__(name="repeated")
            self.dense = layers.Dense(4, name="dense")

        @tf.function  # type: ignore[untyped-decorator]
        def call(self, x: Any) -> Any:
            for _ in tf.range(3):
                x = self.dense(x)
            return x

    model = keras.Sequential([Repeated()], name="net")
    model(X)
    kernel, bias = map(np.asarray, model.layers[0].dense.weights)
    expected = [X]
    for _ in range(3):
        expected.append(2 * (expected[-1] @ kernel + bias))
    for call in (model, tf.function(model)):
        capture = Capture(modules=["net/repeated/dense"])
        with amanda.apply(Steer("scale", factor=2.0, modules=["net/repeated/dense"]), capture):
            np.testing.assert_allclose(call(X), expected[-1], rtol=1e-4, atol=1e-5)
        for value, one in zip(capture.result().values, expected[1:], strict=True):
            np.testing.assert_allclose(capture.result().read(value), one, rtol=1e-4, atol=1e-5)


def test_what_a_graph_cannot_tell_apart_is_refused_and_still_captured() -> None:
    given = keras.Input((4,))
    hidden = layers.Dense(4, name="a")(given)
    added = layers.Add(name="sum")([hidden, layers.Dropout(0.5, name="drop")(hidden)])
    model = keras.Model(given, added, name="net")
    plain = np.asarray(model(X))
    tool = Steer("scale", factor=3.0, modules=["net/drop"])
    with amanda.apply(tool):
        # Eagerly, what the layer returns is another tensor than what it was given.
        np.testing.assert_allclose(model(X), plain * 2, rtol=1e-5)
    with amanda.apply(tool), pytest.raises(UnsupportedError, match="one tensor in two places"):
        tf.function(model)(X)
    capture = Capture(modules=["net/drop"])
    with amanda.apply(capture):
        np.testing.assert_allclose(tf.function(model)(X), plain, rtol=1e-6)
    (value,) = values_of(capture.result(), "net/drop")
    np.testing.assert_allclose(value, plain / 2, rtol=1e-5)


def test_edits_of_a_layer_in_a_graph_are_not_differentiated() -> None:
    model, _ = functional()
    with (
        amanda.apply(Steer("scale", factor=2.0, modules=["net/twice"])),
        amanda.autodiff_enabled(),
        pytest.raises(UnsupportedError, match="neither replaced nor differentiated"),
    ):
        tf.function(model)(X)


def test_a_mask_stays_with_the_value_that_a_layer_returns() -> None:
    tokens = np.array([[1, 2, 3, 0], [4, 0, 0, 0]])
    embedding = layers.Embedding(5, 3, mask_zero=True, name="embedding")
    model = keras.Sequential([embedding, layers.LSTM(2, name="lstm")], name="net")
    plain = np.asarray(model(tokens))
    for mode in MODES.values():
        with amanda.apply(Steer("scale", factor=1.0, modules=["net/embedding"])):
            np.testing.assert_allclose(mode(model)(tokens), plain, rtol=1e-5)


def test_a_value_that_tensorflow_cancels_is_observed() -> None:
    @tf.function  # type: ignore[untyped-decorator]
    def program(x: Any) -> Any:
        return tf.transpose(tf.transpose(x)) + 1

    for values in ("inputs", "outputs"):
        capture = Capture(ops=["Transpose"], values=[values], operands=[0])
        with amanda.apply(capture):
            program(tf.constant(X))
        assert [op.calls for op in capture.result().ops] == [1, 1]


def test_nothing_of_a_recorded_function_is_kept() -> None:
    model, _ = functional()
    function = tf.function(model)
    with amanda.apply(Capture(modules=["net/*"])):
        function(X)
    graph = weakref.ref(function.get_concrete_function(tf.TensorSpec((4, 4))).graph)
    del model, function, _
    keras.backend.clear_session()
    gc.collect()
    assert graph() is None
