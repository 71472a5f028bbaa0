"""Both interceptors give each op of real programs the record that a walk of the stack gives."""

# mypy: allow-subclassing-any, allow-untyped-calls, allow-untyped-decorators
# TensorFlow and Keras have no types.

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import execute

import amanda
from amanda_core.testing.kit.tools import idle, tool
from amanda_driver_tf.identity.call_sites import PythonCallSite
from amanda_driver_tf.identity.places import Forward
from amanda_driver_tf.tensorflow_internals.versions import VARIABLE
from amanda_driver_tf.threads import STATE

from .tensors import normal, variable

Seen = list[tuple[Any, ...]]


@contextlib.contextmanager
def noting(seen: Seen) -> Iterator[None]:
    """Store the record of each forward op when TensorFlow executes it."""
    fast, slow = pywrap_tfe.TFE_Py_FastPathExecute, execute.execute

    def note(name: str) -> None:
        place = STATE.eager
        if isinstance(place, Forward):
            last = place.activations[-1].last
            site = None if last is None else (last.number, last.site.key, last.watched)
            seen.append((name, len(place.activations), site))

    def fast_path(ctx: Any, op_name: str, name: Any, *args: Any) -> Any:
        note(op_name)
        return fast(ctx, op_name, name, *args)

    def execute_op(op_name: Any, *args: Any, **kwargs: Any) -> Any:
        note(op_name if isinstance(op_name, str) else op_name.decode())
        return slow(op_name, *args, **kwargs)

    pywrap_tfe.TFE_Py_FastPathExecute, execute.execute = fast_path, execute_op
    try:
        yield
    finally:
        pywrap_tfe.TFE_Py_FastPathExecute, execute.execute = fast, slow


X = normal(2, 8)
IMAGES = normal(2, 12, 12, 3)
W = variable(8, 8)


class Recursive(keras.layers.Layer):
    """Calls itself, helpers on several lines, a generator, and code that exec() made."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(8)
        self.space: dict[str, Any] = {"tf": tf}
        exec("def made(x):\n    x = tf.tanh(x)\n    return tf.tanh(x) + x", self.space)

    def helper(self, x: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(x) * 2.0

    def parts(self, x: tf.Tensor) -> Iterator[tf.Tensor]:
        for _ in range(3):
            yield self.helper(x)
        yield from (tf.exp(-part) for part in tf.split(x, 2))

    def call(self, x: tf.Tensor, depth: int = 3) -> tf.Tensor:
        if depth:
            x = self(x, depth=depth - 1)
        x = self.helper(self.dense(x))
        x = self.helper(self.space["made"](x))
        first, *_, last = self.parts(x)
        return first + tf.reduce_sum(last)


class Failing(keras.layers.Layer):
    """Raises in some calls, before, in and after an op."""

    turn = 0

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.turn += 1
        x = tf.nn.relu(x)
        if self.turn % 4 == 1:
            raise ValueError
        if self.turn % 4 == 2:
            x = tf.matmul(x, tf.ones((3, 3)))
        x = tf.matmul(x, W)
        if self.turn % 4 == 3:
            tf.reshape(x, [7, 7])
        return x


def network() -> Any:
    inputs = keras.Input((12, 12, 3))
    x = keras.layers.Conv2D(4, 3, padding="same", use_bias=False)(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.ReLU()(x)
    y = keras.layers.SeparableConv2D(4, 3, padding="same")(x)
    x = keras.layers.MaxPooling2D()(keras.layers.Add()([x, y]))
    x = keras.layers.Dropout(0.5, seed=1)(keras.layers.Flatten()(x))
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def convolutional() -> Callable[[], Any]:
    model = network()
    return lambda: model(IMAGES, training=False)


def trained() -> Callable[[], Any]:
    model, optimizer = network(), keras.optimizers.Adam()
    labels = tf.constant([0, 1])

    def step() -> None:
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                labels, model(IMAGES, training=True), from_logits=True
            )
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    return step


def attention() -> Callable[[], Any]:
    layer = keras.layers.MultiHeadAttention(2, 4)
    norm = keras.layers.LayerNormalization()
    tokens = normal(2, 5, 8)
    return lambda: norm(layer(tokens, tokens, use_causal_mask=True) + tokens)


def recurrent() -> Callable[[], Any]:
    model = keras.Sequential([keras.layers.GRU(4, unroll=True), keras.layers.Dense(2)])
    tokens = normal(2, 5, 8)
    return lambda: model(tokens)


def halves() -> Callable[[], Any]:
    layer = keras.layers.Dense(8, dtype="mixed_float16", activation="gelu")
    return lambda: layer(X)


def recursive() -> Callable[[], Any]:
    layer = Recursive()
    return lambda: layer(X)


def failing() -> Callable[[], Any]:
    layer = Failing()

    def run() -> None:
        for _ in range(5):
            with contextlib.suppress(ValueError, tf.errors.InvalidArgumentError):
                layer(X)

    return run


def outside() -> Callable[[], Any]:
    weights = [tf.constant(W), tf.constant(W)]

    def run() -> None:
        x = X
        for turn in range(6):
            with tf.GradientTape() as tape:
                tape.watch(weights)
                x = tf.matmul(x, weights[turn % 2]) + (W[0] if turn % 3 else 1.0)
                x = x / tf.reduce_max(tf.abs(x))
            tape.gradient(x, weights)
        tf.reduce_sum([tf.reduce_mean(one) for one in (x, X)])
        sorted(tf.unstack(x[0]), key=lambda value: float(tf.square(value)))

    return run


def threaded() -> Callable[[], Any]:
    model = network()

    def run() -> None:
        other = threading.Thread(target=lambda: [model(IMAGES) for _ in range(2)])
        other.start()
        model(IMAGES)
        other.join()
        model(IMAGES)

    return run


PROGRAMS = [
    convolutional,
    trained,
    attention,
    recurrent,
    halves,
    recursive,
    failing,
    outside,
    threaded,
]


def fresh(program: Callable[[], Callable[[], Any]]) -> Callable[[], Any]:
    keras.utils.set_random_seed(0)
    keras.backend.clear_session()
    run = program()
    run()
    return run


@pytest.fixture
def walking(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Disable the prediction of ops by the op that they followed last time."""

    def walk() -> None:
        monkeypatch.setenv(VARIABLE, "python")
        monkeypatch.setattr(PythonCallSite, "here", lambda site: False)

    return walk


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_op_has_the_record_that_a_walk_gives(
    program: Callable[[], Callable[[], Any]], interceptor: str, walking: Callable[[], None]
) -> None:
    def seen_by() -> Seen:
        seen: Seen = []
        run = fresh(program)
        with noting(seen), amanda.apply(idle()):
            for _ in range(3):
                run()
        return seen

    got = seen_by()
    walking()
    assert len(got) > 20
    assert got == seen_by()


@pytest.mark.slow
@pytest.mark.parametrize("program", [trained, recursive, failing])
def test_tools_that_ask_always_are_asked_of_the_same_ops(
    program: Callable[[], Callable[[], Any]], interceptor: str, walking: Callable[[], None]
) -> None:
    def asked_of() -> Seen:
        seen: Seen = []
        run = fresh(program)
        noted = tool(lambda context: seen.append((context.op_id, context.name)))
        with amanda.apply(noted), amanda.cache_disabled():
            for _ in range(3):
                run()
        return seen

    got = asked_of()
    walking()
    assert len(got) > 20
    assert got == asked_of()
