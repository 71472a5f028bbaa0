"""A transformer of Keras' layers, trained: watched, and with an edit, against one that has it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.testing.kit.tools import Everywhere, tool, watching_backward

from ..comparison import close, equal
from .reference_programs import as_written, straight

layers: Any = keras.layers

_random = np.random.default_rng(0)
WORDS = _random.integers(1, 30, (3, 5))
WORDS[:, 4:] = 0  # Padding, masked in the attention.
LABELS = np.array([0, 1, 1])


class Dense(layers.Dense):  # type: ignore[misc]  # Keras has no types.
    """A dense layer; in the reference program it has an edited kernel."""

    edited = False

    def call(self, x: Any) -> Any:
        kernel = tf.convert_to_tensor(self.kernel)
        if self.edited:
            kernel = straight(kernel, half)
        rows = tf.reshape(x, (-1, x.shape[-1]))
        return self.activation(tf.linalg.matmul(rows, kernel) + self.bias)


class Edited(Dense):
    edited = True


def half(value: Any) -> Any:
    return value * 0.5 + 0.1


class Encoder(keras.Model):  # type: ignore[misc]
    """Embeddings, a block of attention and a perceptron, and a head on the first token."""

    def __init__(self, dense: Any) -> None:
        super().__init__(name="encoder")
        self.words = layers.Embedding(30, 8, name="words")
        self.places = layers.Embedding(5, 8, name="places")
        self.attention = layers.MultiHeadAttention(2, 4, dropout=0.1, seed=1, name="attention")
        self.norms = [layers.LayerNormalization(name=f"norm{number}") for number in range(3)]
        self.up, self.down = dense(16, activation="gelu", name="up"), dense(8, name="down")
        self.dropout = layers.Dropout(0.1, seed=2)
        self.head = dense(2, name="head")

    def call(self, words: Any, training: bool = False) -> Any:
        mask = (words != 0)[:, None, :]
        x = self.norms[0](self.words(words) + self.places(tf.range(5)))
        mixed = self.attention(x, x, attention_mask=mask, training=training)
        x = self.norms[1](x + self.dropout(mixed, training=training))
        y = tf.reshape(self.down(self.up(x)), (-1, 5, 8))
        x = self.norms[2](x + self.dropout(y, training=training))
        return self.head(x[:, 0])


def trained(function: bool, tools: list[amanda.Tool], dense: Any = Dense) -> list[Any]:
    """Return the losses of two steps, and the variables after them."""
    keras.utils.set_random_seed(0)
    model, optimizer = Encoder(dense), keras.optimizers.SGD(0.5, momentum=0.9)
    model(WORDS)
    optimizer.build(model.trainable_variables)

    def step(words: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(words, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    run = tf.function(step) if function else step
    with amanda.apply(*tools):
        losses = [run(tf.constant(WORDS), tf.constant(LABELS)).numpy() for _ in range(2)]
    return [*losses, *(variable.numpy() for variable in model.trainable_variables)]


@functools.cache
def plain(function: bool) -> list[Any]:
    return trained(function, [])


@pytest.fixture(autouse=True)
def _as_written() -> Iterator[None]:
    with as_written():
        yield


modes = pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])


@pytest.mark.slow
@modes
def test_identities_everywhere_change_no_bit(function: bool) -> None:
    calls: list[int] = []
    pairs, watch = watching_backward()
    found = trained(function, [Everywhere(lambda *values: calls.append(1)), watch])
    equal(found, plain(function))
    assert len(calls) > 1000
    assert {"BatchMatMulV2", "Softmax", "MatMul", "Rsqrt"} <= {owner for _, owner in pairs}


@pytest.mark.slow
@modes
def test_an_edited_weight_is_that_of_a_twin(function: bool) -> None:
    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "MatMul":  # Graphs have batched ones of this name.
            context.insert_before_op(half, inputs=[1])

    wanted = trained(function, [], Edited)
    close(trained(function, [tool(analyse)]), wanted)
    first = zip(plain(function)[:2], wanted[:2], strict=True)
    assert all(not np.allclose(a, b, rtol=1e-3) for a, b in first)
