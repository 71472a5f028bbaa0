"""Effective paths over PyTorch and TensorFlow's modes: the same weights, the same sets.

A little over 400 lines: one subject, its networks in both frameworks.
"""

# mypy: allow-untyped-calls, allow-untyped-decorators
# TensorFlow has no types.

from __future__ import annotations

import functools
import json
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
    return head_of(body_of(x, weights[:8]), weights[8:])


def body_of(x: Any, weights: list[Any]) -> Any:
    value, before = joined_of(x, weights[:7])
    value = tf.concat([value + before, tf.nn.max_pool2d(before, 3, 1, "SAME")], 3)
    return tf.nn.depthwise_conv2d(value, weights[7], [1, 1, 1, 1], "VALID")


def joined_of(x: Any, weights: list[Any]) -> tuple[Any, Any]:
    first, second, bias, scale, shift, mean, variance = weights
    value = tf.nn.conv2d(x, first, 2, "SAME")
    value = tf.nn.bias_add(value, bias)
    value = tf.nn.batch_normalization(value, mean, variance, shift, scale, 1e-3)
    before = value = tf.nn.relu(value)
    return tf.nn.conv2d(value, second, 1, "SAME"), before


def head_of(value: Any, weights: list[Any]) -> Any:
    wide, wide_bias, head = weights
    value = tf.matmul(tf.reshape(value, [-1, 16 * 9]), wide) + wide_bias
    return tf.matmul(tf.nn.relu(value), head)


def in_calls(x: Any, weights: list[Any]) -> Any:
    """Run the network in functions that are called from functions."""

    @tf.function(autograph=False)
    def joined(x: Any, one: Any) -> Any:
        return joined_of(x, [*weights[:2], weights[2] * one, *weights[3:7]])

    @tf.function(autograph=False)
    def body(x: Any) -> Any:
        value, before = joined(x, tf.constant(1.0, x.dtype))
        value = tf.concat([value + before, tf.nn.max_pool2d(before, 3, 1, "SAME")], 3)
        return tf.nn.depthwise_conv2d(value, weights[7], [1, 1, 1, 1], "VALID")

    return head_of(body(x), weights[8:])


def in_branches(x: Any, weights: list[Any]) -> Any:
    """Run the network in the branch that is taken."""
    value = tf.cond(
        tf.reduce_sum(x) > -1e9,
        lambda: body_of(x, weights[:8]),
        lambda: tf.zeros([3, 3, 3, 16], x.dtype),
    )
    return head_of(value, weights[8:])


def in_a_case(x: Any, weights: list[Any]) -> Any:
    value = tf.switch_case(
        tf.cast(tf.reduce_max(x) > -1e9, tf.int32),
        [lambda: tf.zeros([3, 3, 3, 16], x.dtype), lambda: body_of(x, weights[:8])],
    )
    return head_of(value, weights[8:])


def run_eager(tool: EffectivePath) -> None:
    weights = [tf.Variable(weight) for weight in weights_for_tensorflow()]
    with amanda.apply(tool):
        in_tensorflow(tf.constant(X.transpose(0, 2, 3, 1)), weights)
        amanda.step()


def run_function(tool: EffectivePath, network: Any = in_tensorflow) -> None:
    weights = [tf.Variable(weight) for weight in weights_for_tensorflow()]
    function = tf.function(lambda x: network(x, weights))
    with amanda.apply(tool):
        function(tf.constant(X.transpose(0, 2, 3, 1)))


def run_graph(tool: EffectivePath, network: Any = in_tensorflow) -> None:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float64, [None, 7, 7, 2])
        weights = [
            v1.get_variable(f"w{number}", initializer=weight, use_resource=True)
            for number, weight in enumerate(weights_for_tensorflow())
        ]
        logits = network(x, weights)
    with v1.Session(graph=graph) as session:
        with graph.as_default():
            session.run(v1.global_variables_initializer())
        with amanda.apply(tool):
            session.run(logits, {x: X.transpose(0, 2, 3, 1)})


RUNS: dict[str, Callable[[EffectivePath], None]] = {
    "eager": run_eager,
    "function": run_function,
    "graph": run_graph,
    "calls": functools.partial(run_function, network=in_calls),
    "calls from a graph": functools.partial(run_graph, network=in_calls),
    "branches": functools.partial(run_function, network=in_branches),
    "a case": functools.partial(run_function, network=in_a_case),
    "branches of a graph": functools.partial(run_graph, network=in_branches),
}


def of_torch(**options: Any) -> EffectivePathResult:
    kept = (FIRST, SECOND, BIAS, SCALE, SHIFT, MEAN, VARIANCE, DEPTHWISE, WIDE, WIDE_BIAS, HEAD)
    weights = [torch.from_numpy(weight) for weight in kept]
    tool = EffectivePath(cost=None, until="step", **options)
    with amanda.apply(tool):
        in_torch(torch.from_numpy(X), weights)
        amanda.step()
    return tool.result()


#: Elements of a value -> its shape in PyTorch; of the flattened one, that from before.
SHAPES = {98: (2, 7, 7), 64: (4, 4, 4), 128: (8, 4, 4), 144: (16, 3, 3)}


def channels_first(indices: Any, elements: int) -> list[int]:
    """Convert indices of a value with channels last to channels first."""
    if elements not in SHAPES:
        return sorted(indices.tolist())
    channels, *space = shape = SHAPES[elements]
    places = np.unravel_index(indices, (*space, channels))
    return sorted(np.ravel_multi_index((places[-1], *places[:-1]), shape).tolist())


def by_kind(result: EffectivePathResult) -> dict[str, list[tuple[str, int]]]:
    """Return names and elements of the values by kind; a graph's order may differ between kinds."""
    found: dict[str, list[tuple[str, int]]] = {}
    for layer in result.layers:
        if layer.name.rpartition("/")[2].startswith("Identity"):
            continue  # Functions and branches end with one.
        found.setdefault(layer.kind, []).append((layer.name, layer.elements))
    return found


@pytest.mark.parametrize(
    "variant",
    ["FwAB", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cumulative", "BwAB"))],
)
@pytest.mark.parametrize("mode", list(RUNS))
def test_the_sets_of_pytorch(mode: str, variant: Any) -> None:
    options: Any = {"variant": variant, "theta": 0.7, "term_threshold": 0.05}
    expected = of_torch(**options)
    tool = EffectivePath(cost=None, **options, until="step")
    RUNS[mode](tool)
    found = tool.result()
    assert found.ends == expected.ends == []
    ours, theirs = by_kind(found), by_kind(expected)
    assert ours.keys() == theirs.keys()
    compared = 0
    for mine, other in zip(found.paths, expected.paths, strict=True):
        assert mine.predicted == other.predicted
        for kind, values in theirs.items():
            for (name, elements), (counterpart, same) in zip(ours[kind], values, strict=True):
                assert elements == same
                indices = channels_first(mine.points[name], elements)
                assert indices == other.points[counterpart].tolist(), counterpart
                compared += 1
            if kind in ("conv", "linear"):
                for (name, _), (counterpart, _) in zip(ours[kind], values, strict=True):
                    assert len(mine.edges[name]) == len(other.edges[counterpart])
                    assert len(mine.weights[name]) == len(other.weights[counterpart])
    assert compared == 3 * len(expected.layers)
    assert len(expected.layers) == (5 if variant == "FwAB" else 13)


def test_slices() -> None:
    """The same in PyTorch, eagerly, in a function and in a session, in each way to write them."""
    x, weight, head = draw(3, 2, 5), draw(5, 6), draw(5, 4)
    kept = [torch.from_numpy(array) for array in (x, weight, head)]
    expected = EffectivePath(cost=None, until="step", theta=0.8)
    with amanda.apply(expected):
        value = kept[0][:, -1] @ kept[1]
        value = torch.cat([value[:, None, 1::2].flatten(1), value.narrow(1, 2, 2)], 1)
        value @ kept[2]
        amanda.step()

    def network(x: Any) -> Any:
        value = tf.matmul(x[:, -1], tf.constant(weight))
        sliced = tf.reshape(value[:, tf.newaxis, 1::2], [-1, 3])
        value = tf.concat([sliced[..., :], tf.slice(value, [0, 2], [-1, 2])], 1)
        return tf.matmul(value, tf.constant(head))

    def in_session(x: Any) -> None:
        with tf.Graph().as_default():
            given = v1.placeholder(tf.float64, [None, 2, 5])
            logits = network(given)
            with v1.Session() as session:
                session.run(logits, {given: x})

    theirs = [list(path.points.values()) for path in expected.result().paths]
    assert expected.result().ends == []
    for run in (network, tf.function(network), in_session):
        tool = EffectivePath(cost=None, until="step", theta=0.8)
        with amanda.apply(tool):
            run(x if run is in_session else tf.constant(x))
            amanda.step()
        found = tool.result()
        assert found.ends == []
        assert sum(layer.kind == "slice" for layer in found.layers) == 4
        for path, other in zip(found.paths, theirs, strict=True):
            sets = [points.tolist() for points in path.points.values()]
            assert all(points.tolist() in sets for points in other)
            assert sets[-1] == other[-1].tolist()  # What is taken of the input.


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
        tool = EffectivePath(cost=None)
        with amanda.apply(tool):
            program()
        results.append(tool.result())
    predicted = model(x, training=False).numpy().argmax(1).tolist()
    kinds = ["input", "conv", "batch_norm", "reshape", "pad", "avg_pool", "mean"]
    for result in results:
        assert result.ends == []
        assert [path.predicted for path in result.paths] == predicted
        assert [layer.kind for layer in result.layers][:7] == kinds
        assert [layer.kind for layer in result.layers].count("linear") == 2
    for path in results[0].paths:
        assert all(len(found) for found in path.points.values())


SAMPLES = draw(4, 6).astype(np.float32)
DOUBLE, NARROW = np.eye(6, dtype=np.float32) * 2, draw(6, 3).astype(np.float32)


@tf.function(autograph=False)
def doubled(x: Any) -> Any:
    return tf.matmul(x, DOUBLE)


def rounds(x: Any) -> Any:
    return tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, doubled(y)), (0, x))[1]


def chosen(x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > -1e9, lambda: tf.matmul(x, DOUBLE), lambda: x)


def half(x: Any) -> Any:
    return tf.concat([tf.split(x, 2, 1)[1], tf.split(x, 2, 1)[1]], 1)


CALL, FRAME = "StatelessWhile", "control flow that is not a function is not followed"
#: The ops before a layer, and the mode -> the op at which paths end, and why.
IN_FRONT: dict[str, tuple[Callable[[Any], Any], str, list[tuple[str, str, bool]]]] = {
    "loop": (rounds, "function", [(CALL, "loops are not followed", True)]),
    "loop of a graph": (rounds, "graph", [(CALL, "loops are not followed", True)]),
    "loop of version 1": (rounds, "version 1", [("Exit", FRAME, True)]),
    "branch of version 1": (chosen, "version 1", [("Merge", FRAME, True)]),
    "two calls": (
        lambda x: doubled(doubled(x)),
        "function",
        [("PartitionedCall", "its function is called 2 times in one run", True)],
    ),
    "no rule": (
        lambda x: half(doubled(x)),
        "function",
        [("split", "there is no rule for split", True)] * 2,
    ),
    "no rule, no layer": (
        half,
        "function",
        [("split", "there is no rule for split", False)] * 2,
    ),
}


@pytest.mark.parametrize("name", list(IN_FRONT))
def test_what_is_not_followed_is_listed(name: str) -> None:
    in_front, mode, expected = IN_FRONT[name]

    def network(x: Any) -> Any:
        return tf.matmul(in_front(x), NARROW)

    tool = EffectivePath(cost=None)
    if mode == "function":
        function = tf.function(network, autograph=False)
        with amanda.apply(tool):
            for _ in range(2):
                function(tf.constant(SAMPLES))
    else:
        if mode == "version 1":
            v1.disable_control_flow_v2()
        try:
            with tf.Graph().as_default() as graph:
                x = v1.placeholder(tf.float32, SAMPLES.shape)
                logits = network(x)
        finally:
            v1.enable_control_flow_v2()
        with v1.Session(graph=graph) as session, amanda.apply(tool):
            for _ in range(2):
                session.run(logits, {x: SAMPLES})
    result = tool.result()
    assert len(result.paths) == 8
    assert [(end.type, end.reason, end.lost) for end in result.ends] == expected
    for end in result.ends:
        assert end.runs == 2
        if end.lost:
            assert f"{end.name} ({end.type}: {end.reason})" in result.table().title
            assert (end.name, "end") in {(layer.name, layer.kind) for layer in result.layers}
    assert [row[:3] for row in result.table("end").rows] == [
        (end.name, end.type, 2) for end in result.ends
    ]
    assert [end["consequence"] for end in json.loads(result.to_json())["ends"]] == [
        end.consequence for end in result.ends
    ]
    assert [layer.kind for layer in result.layers].count("linear") == 1


def test_an_operator_that_is_left_out_is_listed() -> None:
    function = tf.function(lambda x: tf.matmul(tf.nn.relu(tf.matmul(x, DOUBLE)), NARROW))
    tool = EffectivePath(cost=None).where(amanda.select(lambda context: context.op_type != "Relu"))
    with amanda.apply(tool):
        function(tf.constant(SAMPLES))
    [end] = tool.result().ends
    assert (end.name, end.type, end.lost) == ("Relu", "Relu", True)
    assert end.reason == "it is not an operator that the tool sees"


def test_a_run_that_ends_with_what_is_not_followed() -> None:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, SAMPLES.shape)
        rounds(x)
        [loop] = [op for op in graph.get_operations() if op.type == CALL]
        [logits] = [output for output in loop.outputs if output.shape == SAMPLES.shape]
    tool = EffectivePath(cost=None)
    with v1.Session(graph=graph) as session, amanda.apply(tool):
        session.run(logits, {x: SAMPLES})
    result = tool.result()
    assert (result.paths, result.empty) == ([], 1)
    assert "1 run with NO path" in result.table().title


def test_gradients_are_no_run() -> None:
    weight = tf.Variable(DOUBLE)
    function = tf.function(lambda x: tf.matmul(tf.matmul(x, weight), NARROW))
    tool = EffectivePath(cost=None)
    with amanda.apply(tool):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(function(tf.constant(SAMPLES)))
        assert tape.gradient(total, weight) is not None
        amanda.step()
    result = tool.result()
    assert len(result.paths) == len(SAMPLES)
    assert (result.ends, result.empty) == ([], 0)
