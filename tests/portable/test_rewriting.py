"""Rewriting in TensorFlow's modes: a convolution and the normalisation behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_tools.rewriting import Input, Operator, Rewrite, Rule

v1 = tf.compat.v1
_random = np.random.default_rng(0)
X = _random.normal(size=(2, 6, 6, 3)).astype(np.float32)
KERNEL, SCALE, SHIFT, MEAN = (
    _random.normal(size=shape).astype(np.float32) for shape in ((3, 3, 3, 4), 4, 4, 4)
)
VARIANCE = np.abs(_random.normal(size=4)).astype(np.float32) + 0.1


def network(x: Any, kernel: Any, training: bool = False, beside: bool = False) -> Any:
    value = tf.nn.conv2d(x, kernel, 2, "SAME")
    statistics = () if training else (MEAN, VARIANCE)
    normal, _, _ = v1.nn.fused_batch_norm(
        value, SCALE, SHIFT, *statistics, epsilon=1e-3, is_training=training
    )
    return tf.nn.relu(normal) + (value if beside else 0.0)


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
            amanda.step()  # A call whose gradients are asked for ends none.
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
