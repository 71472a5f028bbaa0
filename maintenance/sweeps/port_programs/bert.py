"""The encoder of BERT in transformers, and its port to layers of Keras."""

from __future__ import annotations

import keras
import numpy
import tensorflow as tf
import torch
from torch import nn
from transformers import BertConfig, BertModel

from .planted import At, Plant, Run, main

WIDTH, HEADS, HIDDEN, WORDS, LENGTH, DEPTH = 16, 2, 32, 30, 7, 2
HEAD = WIDTH // HEADS
EPSILON = 1e-12
_TOKENS = numpy.random.default_rng(0).integers(0, WORDS, (2, LENGTH))
_PRESENT = numpy.arange(LENGTH) < numpy.array([[LENGTH], [LENGTH - 2]])
_LAYER = "encoder.layer.{}"
_SELF = "encoder.layer.{}.attention.self"
PLANTS = (
    Plant("epsilon", "embeddings.LayerNorm"),
    Plant("epsilon", _LAYER.format(1) + ".output.LayerNorm"),
    Plant(
        "tanh gelu",
        _LAYER.format(0) + ".intermediate",
        (_LAYER.format(0) + ".intermediate.intermediate_act_fn",),
    ),
    Plant("positions", "embeddings", ("embeddings.position_embeddings",)),
    Plant("transposed kernel", _LAYER.format(1) + ".attention.output.dense"),
    Plant("scale", _SELF.format(0)),
    Plant("bias", _SELF.format(1) + ".value"),
    Plant(
        "order",
        _LAYER.format(0) + ".attention.output",
        (_LAYER.format(0) + ".attention.output.LayerNorm",),
    ),
    Plant("dtype", _LAYER.format(1) + ".intermediate.dense"),
    Plant("mask", _SELF.format(1)),
)


def _original() -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=HIDDEN,
        max_position_embeddings=LENGTH,
        layer_norm_eps=EPSILON,
        initializer_range=0.3,
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    for one in model.modules():
        if isinstance(one, nn.Linear):
            nn.init.normal_(one.bias, 0.0, 0.2)
    return model


def ours() -> Run:
    model = _original()

    def run() -> object:
        with torch.no_grad():
            tokens, present = torch.tensor(_TOKENS), torch.tensor(_PRESENT).long()
            return model(tokens, attention_mask=present)

    return run


class Block(keras.layers.Layer):  # type: ignore[misc]  # No types.
    def __init__(self, at: At, number: int) -> None:
        super().__init__(name=f"block_{number}")
        self.at, self.theirs = at, _LAYER.format(number)
        self.attention = keras.layers.MultiHeadAttention(HEADS, HEAD, name="attention")
        if at("scale", _SELF.format(number)):
            self.attention._inverse_sqrt_key_dim = 1.0
        self.norm1 = keras.layers.LayerNormalization(epsilon=EPSILON, name="norm1")
        wrong = at("epsilon", f"{self.theirs}.output.LayerNorm")
        self.norm2 = keras.layers.LayerNormalization(
            epsilon=1e-3 if wrong else EPSILON, name="norm2"
        )
        half = at("dtype", f"{self.theirs}.intermediate.dense")
        self.up = keras.layers.Dense(HIDDEN, name="up", dtype="bfloat16" if half else "float32")
        self.down = keras.layers.Dense(WIDTH, name="down")
        self.tanh = at("tanh gelu", f"{self.theirs}.intermediate")
        self.before = at("order", f"{self.theirs}.attention.output")
        self.masked = not at("mask", _SELF.format(number))

    def call(self, x: object) -> object:
        mask = tf.constant(_PRESENT)[:, None] if self.masked else None
        if self.before:
            y = self.norm1(x)
            x = x + self.attention(y, y, attention_mask=mask)
        else:
            x = self.norm1(x + self.attention(x, x, attention_mask=mask))
        y = tf.cast(self.up(x), tf.float32)
        return self.norm2(x + self.down(tf.nn.gelu(y, approximate=self.tanh)))

    def copy(self, weights: dict[str, numpy.ndarray]) -> None:
        name = f"{self.theirs}.attention"
        found = []
        for part in ("query", "key", "value"):
            kernel, bias = (weights[f"{name}.self.{part}.{kind}"] for kind in ("weight", "bias"))
            if self.at("bias", f"{name}.self.{part}"):
                bias = bias * 0
            found += [kernel.T.reshape(WIDTH, HEADS, HEAD), bias.reshape(HEADS, HEAD)]
        kernel = weights[f"{name}.output.dense.weight"]
        kernel = kernel if self.at("transposed kernel", f"{name}.output.dense") else kernel.T
        found += [kernel.reshape(HEADS, HEAD, WIDTH), weights[f"{name}.output.dense.bias"]]
        self.attention.set_weights(found)
        for mine, theirs in (
            (self.norm1, "attention.output.LayerNorm"),
            (self.norm2, "output.LayerNorm"),
            (self.up, "intermediate.dense"),
            (self.down, "output.dense"),
        ):
            parts = [weights[f"{self.theirs}.{theirs}.{kind}"] for kind in ("weight", "bias")]
            mine.set_weights([part.T for part in parts])


def port(at: At) -> Run:
    weights = {name: value.numpy() for name, value in _original().state_dict().items()}
    words = keras.layers.Embedding(WORDS, WIDTH, name="words")
    places = keras.layers.Embedding(LENGTH, WIDTH, name="places")
    epsilon = 1e-3 if at("epsilon", "embeddings.LayerNorm") else EPSILON
    norm = keras.layers.LayerNormalization(epsilon=epsilon, name="norm")
    blocks = [Block(at, number) for number in range(DEPTH)]
    kind = weights["embeddings.token_type_embeddings.weight"][0]

    def run(tokens: object) -> object:
        steps = tf.range(LENGTH)
        if at("positions", "embeddings"):
            steps = tf.minimum(steps + 1, LENGTH - 1)
        x = norm(words(tokens) + places(steps) + kind)
        for block in blocks:
            x = block(x)
        return x

    run(tf.constant(_TOKENS))
    words.set_weights([weights["embeddings.word_embeddings.weight"]])
    places.set_weights([weights["embeddings.position_embeddings.weight"]])
    norm.set_weights([weights[f"embeddings.LayerNorm.{part}"] for part in ("weight", "bias")])
    for block in blocks:
        block.copy(weights)
    return lambda: run(tf.constant(_TOKENS))


if __name__ == "__main__":
    main(PLANTS, ours, port)
