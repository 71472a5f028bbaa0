"""Effective paths over PyTorch and TensorFlow's modes: the same weights, the same sets."""

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

import amanda
from amanda_tools.effective_path import EffectivePath, EffectivePathResult

v1 = tf.compat.v1
_random = np.random.default_rng(5)


def draw(*shape: int) -> Any:
    return _random.normal(size=shape)


#: In double precision, so that no set depends on the order of a sum.
X = draw(3, 2, 7, 7)
FIRST, SECOND, BIAS = draw(4, 2, 3, 3), draw(4, 4, 3, 3), draw(4)
SCALE, SHIFT, MEAN, VARIANCE = draw(4), draw(4), draw(4), np.abs(draw(4)) + 0.1
# Two channels for each of the eight that there are.
DEPTHWISE = draw(16, 1, 2, 2)
WIDE, WIDE_BIAS, HEAD = draw(6, 16 * 9), draw(6), draw(4, 6)


def in_torch(x: Any, weights: list[Any]) -> Any:
    first, second, bias, scale, shift, mean, variance, depthwise, wide, wide_bias, head = weights
    value = F.conv2d(x, first, bias, stride=2, padding=1)
    value = F.batch_norm(value, mean, variance, scale, shift, eps=1e-3)
    before = value = torch.relu(value)
    value = F.conv2d(value, second, padding=1)
    value = torch.cat([value + before, F.max_pool2d(before, 3, 1, 1)], 1)
    value = F.conv2d(value, depthwise, groups=8)
    value = F.linear(value.flatten(1), wide, wide_bias)
    return F.linear(torch.relu(value), head)


def kernel(weight: Any) -> Any:
    return weight.transpose(2, 3, 1, 0)


def weights_for_tensorflow() -> list[Any]:
    depthwise = DEPTHWISE.reshape(8, 2, 2, 2).transpose(2, 3, 0, 1)
    wide = WIDE.reshape(6, 16, 3, 3).transpose(2, 3, 1, 0).reshape(-1, 6)
    return [
        *(kernel(FIRST), kernel(SECOND), BIAS, SCALE, SHIFT, MEAN, VARIANCE),
        *(depthwise, wide, WIDE_BIAS, HEAD.T),
    ]


def in_tensorflow(x: Any, weights: list[Any]) -> Any:
    first, second, bias, scale, shift, mean, variance, depthwise, wide, wide_bias, head = weights
    value = tf.nn.conv2d(x, first, 2, "SAME")
    value = tf.nn.bias_add(value, bias)
    value = tf.nn.batch_normalization(value, mean, variance, shift, scale, 1e-3)
    before = value = tf.nn.relu(value)
    value = tf.nn.conv2d(value, second, 1, "SAME")
    value = tf.concat([value + before, tf.nn.max_pool2d(before, 3, 1, "SAME")], 3)
    value = tf.nn.depthwise_conv2d(value, depthwise, [1, 1, 1, 1], "VALID")
    value = tf.matmul(tf.reshape(value, [-1, 16 * 9]), wide) + wide_bias
    return tf.matmul(tf.nn.relu(value), head)


def run_eager(tool: EffectivePath) -> None:
    weights = [tf.Variable(weight) for weight in weights_for_tensorflow()]
    with amanda.apply(tool):
        in_tensorflow(tf.constant(X.transpose(0, 2, 3, 1)), weights)
        amanda.step()


def run_function(tool: EffectivePath) -> None:
    weights = [tf.Variable(weight) for weight in weights_for_tensorflow()]
    function = tf.function(lambda x: in_tensorflow(x, weights))
    with amanda.apply(tool):
        function(tf.constant(X.transpose(0, 2, 3, 1)))


def run_graph(tool: EffectivePath) -> None:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float64, [None, 7, 7, 2])
        weights = [
            v1.get_variable(f"w{number}", initializer=weight, use_resource=True)
            for number, weight in enumerate(weights_for_tensorflow())
        ]
        logits = in_tensorflow(x, weights)
    with v1.Session(graph=graph) as session:
        with graph.as_default():
            session.run(v1.global_variables_initializer())
        with amanda.apply(tool):
            session.run(logits, {x: X.transpose(0, 2, 3, 1)})


RUNS: dict[str, Callable[[EffectivePath], None]] = {
    "eager": run_eager,
    "function": run_function,
    "graph": run_graph,
}


def of_torch(**options: Any) -> EffectivePathResult:
    kept = (FIRST, SECOND, BIAS, SCALE, SHIFT, MEAN, VARIANCE, DEPTHWISE, WIDE, WIDE_BIAS, HEAD)
    weights = [torch.from_numpy(weight) for weight in kept]
    tool = EffectivePath(until="step", **options)
    with amanda.apply(tool):
        in_torch(torch.from_numpy(X), weights)
        amanda.step()
    return tool.result()


#: Elements of a value -> its shape in PyTorch; of the flattened one, that from before.
SHAPES = {98: (2, 7, 7), 64: (4, 4, 4), 128: (8, 4, 4), 144: (16, 3, 3)}


def channels_first(indices: Any, elements: int) -> list[int]:
    """Indices of a value with its channels last, as they are with channels first."""
    if elements not in SHAPES:
        return sorted(indices.tolist())
    channels, *space = shape = SHAPES[elements]
    places = np.unravel_index(indices, (*space, channels))
    return sorted(np.ravel_multi_index((places[-1], *places[:-1]), shape).tolist())


def by_kind(result: EffectivePathResult) -> dict[str, list[tuple[str, int]]]:
    """Names and elements of the values; a graph's order may differ between kinds."""
    found: dict[str, list[tuple[str, int]]] = {}
    for layer in result.layers:
        if layer.name == "Identity":
            continue  # Functions end with one.
        found.setdefault(layer.kind, []).append((layer.name, layer.elements))
    return found


@pytest.mark.parametrize("variant", ["cumulative", "BwAB", "FwAB"])
@pytest.mark.parametrize("mode", list(RUNS))
def test_the_sets_of_pytorch(mode: str, variant: Any) -> None:
    options: Any = {"variant": variant, "theta": 0.7, "term_threshold": 0.05}
    expected = of_torch(**options)
    tool = EffectivePath(**options, until="step")
    RUNS[mode](tool)
    found = tool.result()
    assert found.problems == expected.problems == {}
    ours, theirs = by_kind(found), by_kind(expected)
    assert ours.keys() == theirs.keys()
    compared = 0
    for mine, other in zip(found.paths, expected.paths, strict=True):
        assert mine.predicted == other.predicted
        for kind, values in theirs.items():
            for (name, elements), (twin, same) in zip(ours[kind], values, strict=True):
                assert elements == same
                indices = channels_first(mine.points[name], elements)
                assert indices == other.points[twin].tolist(), twin
                compared += 1
            if kind in ("conv", "linear"):
                for (name, _), (twin, _) in zip(ours[kind], values, strict=True):
                    assert len(mine.edges[name]) == len(other.edges[twin])
                    assert len(mine.weights[name]) == len(other.weights[twin])
    assert compared == 3 * len(expected.layers)
    assert len(expected.layers) == (5 if variant == "FwAB" else 13)


def test_keras_layers() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3, padding="same"),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.ZeroPadding2D(1),
            keras.layers.AveragePooling2D(2, 2, "same"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(6, activation="relu"),
            keras.layers.Dense(4, activation="softmax"),
        ]
    )
    x = np.random.default_rng(0).normal(size=(5, 8, 8, 3)).astype(np.float32)
    results = []
    for program in (
        lambda: model(x, training=False),
        lambda: model.predict(x, batch_size=5, verbose=0),
        lambda: tf.function(lambda: model(x, training=False))(),
    ):
        tool = EffectivePath()
        with amanda.apply(tool):
            program()
        results.append(tool.result())
    predicted = model(x, training=False).numpy().argmax(1).tolist()
    kinds = ["input", "conv", "batch_norm", "reshape", "pad", "avg_pool", "mean"]
    for result in results:
        assert result.problems == {}
        assert [path.predicted for path in result.paths] == predicted
        assert [layer.kind for layer in result.layers][:7] == kinds
        assert [layer.kind for layer in result.layers].count("linear") == 2
    for path in results[0].paths:
        assert all(len(found) for found in path.points.values())
