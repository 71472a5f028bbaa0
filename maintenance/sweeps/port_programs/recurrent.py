"""An LSTM and a GRU over embedded words, and their port to Keras."""

from __future__ import annotations

import keras
import numpy
import tensorflow as tf
import torch
from torch import Tensor, nn

from .planted import At, Plant, Run, main

WORDS, WIDTH, CLASSES = 20, 8, 3
_TOKENS = numpy.random.default_rng(0).integers(1, WORDS, (3, 6))
PLANTS = (
    Plant("epsilon", "norm"),
    Plant("scale", "words", ("",)),
    Plant("transposed kernel", "lstm"),
    Plant("bias", "lstm"),
    Plant("gates", "lstm"),
    Plant("transposed kernel", "gru"),
    Plant("bias", "gru"),
    Plant("reset", "gru"),
    Plant("order", "norm", ("gru",)),
    Plant("dtype", "head"),
)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) * WIDTH**0.5
        x = self.norm(self.lstm(x)[0])
        return self.head(self.gru(x)[0][:, -1])


def _original() -> Network:
    torch.manual_seed(0)
    return Network().eval()


def ours() -> Run:
    model = _original()

    def run() -> object:
        with torch.no_grad():
            return model(torch.tensor(_TOKENS))

    return run


def port(at: At) -> Run:
    weights = {name: value.numpy() for name, value in _original().state_dict().items()}
    layers = keras.layers
    words = layers.Embedding(WORDS, WIDTH, name="words")
    lstm = layers.LSTM(WIDTH, return_sequences=True, name="lstm")
    norm = layers.LayerNormalization(epsilon=1e-3 if at("epsilon", "norm") else 1e-5, name="norm")
    gru = layers.GRU(WIDTH, reset_after=not at("reset", "gru"), return_sequences=True, name="gru")
    head = layers.Dense(CLASSES, name="head", dtype="float16" if at("dtype", "head") else "float32")

    def run(tokens: object) -> object:
        x = words(tokens)
        if not at("scale", "words"):
            x = x * WIDTH**0.5
        x = lstm(x)
        x = norm(gru(x)) if at("order", "norm") else gru(norm(x))
        return head(x[:, -1])

    run(tf.zeros((1, 6), tf.int64))
    words.set_weights([weights["words.weight"]])
    norm.set_weights([weights["norm.weight"], weights["norm.bias"]])

    def gates(name: str, order: tuple[int, ...]) -> list[numpy.ndarray]:
        """Return both kernels and both biases with the gates in another order."""
        found = []
        for part in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
            blocks = numpy.split(weights[f"{name}.{part}"], len(order))
            if at("transposed kernel", name) and part == "weight_hh_l0":
                blocks = [block.T for block in blocks]
            found.append(numpy.concatenate([blocks[number] for number in order]))
        if at("bias", name):
            found[3] = found[3] * 0
        return found

    kernel, inner, bias, other = gates(
        "lstm", (0, 2, 1, 3) if at("gates", "lstm") else (0, 1, 2, 3)
    )
    lstm.set_weights([kernel.T, inner.T, bias + other])
    kernel, inner, bias, other = gates("gru", (1, 0, 2))
    biases = bias + other if at("reset", "gru") else numpy.stack([bias, other])
    gru.set_weights([kernel.T, inner.T, biases])
    head.set_weights([weights["head.weight"].T, weights["head.bias"]])
    return lambda: run(tf.constant(_TOKENS))


if __name__ == "__main__":
    main(PLANTS, ours, port)
