"""Comparison across frameworks: ports of a network agree, and a wrong epsilon is named."""

# mypy: allow-untyped-calls
# TensorFlow has no types.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
import torch.nn.functional as F
from torch import nn

import amanda
from amanda_tools.diff import DiffResult, compare
from amanda_tools.dump import Dump, Dumped

from .models import Effect
from .test_portable_tools import PROGRAMS

RTOL, ATOL = 1e-4, 1e-5
_random = np.random.default_rng(1)


def dump(program: Callable[[], Any], **options: Any) -> Dumped:
    tool = Dump(**{"values": ["inputs", "outputs"]} | options)
    with amanda.apply(tool):
        program()
    return tool.result().open()


def named(found: DiffResult) -> set[str | None]:
    return {one.a.word for one in found.compared}


# The network of `models`.


def trained(backend: str, **options: Any) -> Dumped:
    program = PROGRAMS[backend](Effect())
    program.build()

    def run() -> None:
        program.step(0)
        program.finish()

    return dump(run, **options)


@pytest.mark.slow
@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("backend", [name for name in PROGRAMS if name != "pytorch"])
def test_ports_agree(backend: str, stats: bool) -> None:
    one, other = (trained(name, stats=stats) for name in ("pytorch", backend))
    for found in (compare(one, other, RTOL, ATOL), compare(other, one, RTOL, ATOL)):
        assert found.across
        assert found.same, str(found.first)
        assert {"conv2d", "relu", "max_pool2d"} <= named(found) | {
            op.word for op in found.unmatched_a
        }
        assert sum(one.a.word == "relu" for one in found.compared) == 3
    assert "cross_entropy" in named(compare(one, other, RTOL, ATOL))


# A convolutional network with batch normalisation.

_IMAGE = _random.normal(size=(2, 3, 10, 10)).astype(np.float32)
_FILTERS = [
    (_random.normal(size=shape) / 5).astype(np.float32) for shape in ((4, 3, 3, 3), (4, 4, 3, 3))
]
_MATRIX = _random.normal(size=(5, 4)).astype(np.float32)


class TorchNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number, weight in enumerate(_FILTERS, 1):
            layer = nn.Conv2d(weight.shape[1], weight.shape[0], 3, bias=False)
            layer.weight = nn.Parameter(torch.tensor(weight))
            self.add_module(f"conv{number}", layer)
            self.add_module(f"norm{number}", nn.BatchNorm2d(4))
        self.head = nn.Linear(4, 5)
        self.head.weight = nn.Parameter(torch.tensor(_MATRIX))
        nn.init.constant_(self.head.bias, 0.5)

    def forward(self, x: Any) -> Any:
        for number in (1, 2):
            x = self.get_submodule(f"conv{number}")(x)
            x = F.relu(self.get_submodule(f"norm{number}")(x))
        return F.softmax(self.head(x.mean((2, 3))), -1)


class KerasNetwork(keras.Model):  # type: ignore[misc]  # No types.
    def __init__(self, epsilons: tuple[float, float] = (1e-5, 1e-5)) -> None:
        super().__init__()
        self.convolutions = [
            keras.layers.Conv2D(4, 3, use_bias=False, name=f"conv{number}") for number in (1, 2)
        ]
        self.norms = [
            keras.layers.BatchNormalization(epsilon=epsilon, name=f"norm{number}")
            for number, epsilon in enumerate(epsilons, 1)
        ]
        self.head = keras.layers.Dense(5, name="head")
        self(tf.zeros((2, 10, 10, 3)))
        for layer, weight in zip(self.convolutions, _FILTERS, strict=True):
            layer.kernel.assign(weight.transpose(2, 3, 1, 0))
        self.head.kernel.assign(_MATRIX.T)
        self.head.bias.assign(np.full(5, 0.5, np.float32))

    def call(self, x: Any) -> Any:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = tf.nn.relu(norm(convolution(x), training=False))
        return tf.nn.softmax(self.head(tf.reduce_mean(x, [1, 2])))


graph = pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])


def of_torch(model: nn.Module, x: Any) -> Dumped:
    model.eval()
    with torch.no_grad():
        return dump(lambda: model(torch.tensor(x)))


def of_keras(model: Any, x: Any, graph: bool) -> Dumped:
    function = tf.function(model) if graph else model
    return dump(lambda: function(tf.constant(x)))


def networks(graph: bool, epsilons: tuple[float, float] = (1e-5, 1e-5)) -> tuple[Dumped, Dumped]:
    image = np.ascontiguousarray(_IMAGE.transpose(0, 2, 3, 1))
    return of_torch(TorchNetwork(), _IMAGE), of_keras(KerasNetwork(epsilons), image, graph)


@graph
def test_a_convolutional_network(graph: bool) -> None:
    found = compare(*networks(graph), RTOL, ATOL)
    assert found.same, str(found.first)
    words = [one.a.word for one in found.compared]
    for word, number in {"conv2d": 2, "batch_norm": 2, "relu": 2, "softmax": 1}.items():
        assert words.count(word) == number, word
    assert words.count("linear") == 1
    orders = {tuple(one.difference.order or ()) for one in found.compared if one.difference}
    assert (0, 3, 1, 2) in orders


@pytest.mark.slow
@graph
@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("epsilon", [1e-3, 0.5])
def test_a_wrong_epsilon_of_a_batch_norm(wrong: int, epsilon: float, graph: bool) -> None:
    epsilons = (epsilon, 1e-5) if wrong == 0 else (1e-5, epsilon)
    for turned in (False, True):
        dumps = networks(graph, epsilons)
        found = compare(*(dumps[::-1] if turned else dumps), RTOL, ATOL)
        first = found.first
        assert first is not None
        there = first.a if turned else first.b
        here = first.b if turned else first.a
        assert (here.word, here.module) == ("batch_norm", f"norm{wrong + 1}")
        assert f"norm{wrong + 1}" in there.module
        assert first.what == "output"
        assert first.inputs_agree is not False


# A block of a transformer.

_WIDTH, _HEADS = 8, 2
_SIZES = {"query": 8, "key": 8, "value": 8, "out": 8, "up": 16, "down": 8}
_TEXT = _random.normal(size=(2, 5, _WIDTH)).astype(np.float32)
_WEIGHTS = {
    name: (_random.normal(size=(size, 16 if name == "down" else _WIDTH)) / 3).astype(np.float32)
    for name, size in _SIZES.items()
}
_BIASES = {name: _random.normal(size=size).astype(np.float32) for name, size in _SIZES.items()}


class TorchBlock(nn.Module):
    out: nn.Module
    up: nn.Module
    down: nn.Module

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        for name, weight in _WEIGHTS.items():
            layer = nn.Linear(*weight.shape[::-1])
            layer.weight = nn.Parameter(torch.tensor(weight))
            layer.bias = nn.Parameter(torch.tensor(_BIASES[name]))
            self.add_module(name, layer)
        self.norm1 = nn.LayerNorm(_WIDTH)
        self.norm2 = nn.LayerNorm(_WIDTH)

    def heads(self, name: str, x: Any) -> Any:
        return self.get_submodule(name)(x).unflatten(-1, (_HEADS, -1)).transpose(1, 2)

    def forward(self, x: Any) -> Any:
        y = self.norm1(x)
        query, key, value = (self.heads(name, y) for name in ("query", "key", "value"))
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value)
        else:
            scores = query @ key.transpose(-1, -2) / (_WIDTH // _HEADS) ** 0.5
            mixed = F.softmax(scores, -1) @ value
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class KerasBlock(keras.Model):  # type: ignore[misc]  # No types.
    def __init__(self, epsilons: tuple[float, float] = (1e-5, 1e-5)) -> None:
        super().__init__()
        self.layer_of = {name: keras.layers.Dense(size, name=name) for name, size in _SIZES.items()}
        self.norm1, self.norm2 = (
            keras.layers.LayerNormalization(epsilon=epsilon, name=f"norm{number}")
            for number, epsilon in enumerate(epsilons, 1)
        )
        self(tf.zeros((2, 5, _WIDTH)))
        for name, layer in self.layer_of.items():
            layer.kernel.assign(_WEIGHTS[name].T)
            layer.bias.assign(_BIASES[name])

    def heads(self, name: str, x: Any) -> Any:
        y = tf.reshape(self.layer_of[name](x), (2, 5, _HEADS, -1))
        return tf.transpose(y, (0, 2, 1, 3))

    def call(self, x: Any) -> Any:
        y = self.norm1(x)
        query, key, value = (self.heads(name, y) for name in ("query", "key", "value"))
        scores = tf.matmul(query, key, transpose_b=True) / (_WIDTH // _HEADS) ** 0.5
        mixed = tf.transpose(tf.nn.softmax(scores) @ value, (0, 2, 1, 3))
        x = x + self.layer_of["out"](tf.reshape(mixed, (2, 5, _WIDTH)))
        y = tf.nn.gelu(self.layer_of["up"](self.norm2(x)), approximate=True)
        return x + self.layer_of["down"](y)


@graph
@pytest.mark.parametrize("fused", [False, True])
def test_a_block_of_a_transformer(fused: bool, graph: bool) -> None:
    found = compare(
        of_torch(TorchBlock(fused), _TEXT), of_keras(KerasBlock(), _TEXT, graph), RTOL, ATOL
    )
    assert found.same, str(found.first)
    words = [one.a.word for one in found.compared]
    assert words.count("layer_norm") == 2
    assert words.count("linear") == 6
    assert words.count("gelu") == 1
    assert words.count("attention" if fused else "softmax") == 1
    # TensorFlow divides by a number, too.
    assert [op.name for op in found.unmatched_a] == []


@pytest.mark.slow
@graph
@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("epsilon", [1e-3, 0.5])
def test_a_wrong_epsilon_of_a_layer_norm(wrong: int, epsilon: float, graph: bool) -> None:
    epsilons = (epsilon, 1e-5) if wrong == 0 else (1e-5, epsilon)
    dumps = of_torch(TorchBlock(True), _TEXT), of_keras(KerasBlock(epsilons), _TEXT, graph)
    first = compare(*dumps, RTOL, ATOL).first
    assert first is not None
    assert (first.a.word, first.a.module) == ("layer_norm", f"norm{wrong + 1}")
    assert f"norm{wrong + 1}" in first.b.module
    assert first.difference is not None


def test_modes_of_one_framework() -> None:
    eager, function = (of_keras(KerasBlock(), _TEXT, graph) for graph in (False, True))
    found = compare(eager, function, RTOL, ATOL)
    assert found.same, str(found.first)
    assert len(found.compared) > 20
