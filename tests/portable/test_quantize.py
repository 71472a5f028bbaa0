"""`quantize` and `sensitivity` in TensorFlow: the same source, grids by NumPy's arithmetic."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

import amanda
from amanda_tools.quantize import Quantize
from amanda_tools.sensitivity import Sensitivity

tf: Any = pytest.importorskip("tensorflow")


def network() -> tuple[Any, Any, Any, Any]:
    generator = numpy.random.default_rng(0)
    kernel, matrix, x = (
        generator.standard_normal(shape).astype("float32")
        for shape in ((3, 3, 2, 6), (6, 4), (2, 8, 8, 2))
    )
    weights = tf.Variable(kernel), tf.Variable(matrix)

    def run(x: Any) -> Any:
        h = tf.nn.relu(tf.nn.conv2d(x, weights[0], 1, "SAME"))
        return tf.matmul(tf.reduce_mean(h, [1, 2]), weights[1])

    return run, tf.constant(x), kernel, matrix


def rounded(value: Any, largest: Any, highest: float) -> Any:
    scale = largest / highest
    return numpy.round(value / scale).clip(-highest, highest) * scale


@pytest.mark.parametrize("graph", [False, True])
def test_weights_of_a_program_of_tensorflow_have_a_scale_for_each_channel(graph: bool) -> None:
    run, x, kernel, matrix = network()
    program = tf.function(run) if graph else run
    tool = Quantize(weights="int4", activations="none")
    with amanda.apply(tool):
        found = program(x)
    quantized = [
        rounded(one, abs(one).max(tuple(range(one.ndim - 1)), keepdims=True), 7.0)
        for one in (kernel, matrix)
    ]
    h = tf.nn.relu(tf.nn.conv2d(x, quantized[0], 1, "SAME"))
    wanted = tf.matmul(tf.reduce_mean(h, [1, 2]), quantized[1])
    numpy.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert [len(weight.scales) for weight in tool.result().weights] == [6, 4]


@pytest.mark.parametrize("graph", [False, True])
def test_activations_are_calibrated_and_then_quantized(graph: bool) -> None:
    run, x, _kernel, _ = network()
    program = tf.function(run) if graph else run
    tool = Quantize(weights="none", calibration=0)
    with amanda.apply(tool):
        assert float(tf.reduce_max(abs(program(x) - run(x)))) < 1e-5
        tool.freeze()
        assert float(tf.reduce_max(abs(program(x) - run(x)))) < 1e-5  # Both are quantized.
        quantized = program(x)
    assert float(tf.reduce_max(abs(quantized - run(x)))) > 1e-5
    first, _ = tool.result().activations
    values = x.numpy()
    assert first.scale == pytest.approx((values.max() - values.min()) / 255)


def test_damage_in_tensorflow_is_the_noise_times_the_gradient() -> None:
    _run, x, _kernel, matrix = network()
    tool = Sensitivity("int4", "none")
    weight = tf.Variable(matrix)
    with amanda.apply(tool), tf.GradientTape() as tape:
        total = tf.reduce_sum(tf.matmul(x[0, 0, :3] @ tf.ones((2, 6)), weight) ** 2)
        gradient = tape.gradient(total, weight)
    noise = rounded(matrix, abs(matrix).max(0), 7.0) - matrix
    row = max(tool.result().ops, key=lambda op: op.damage or 0.0)
    assert row.damage == pytest.approx(float((noise * gradient).numpy().sum() ** 2 / 2), rel=1e-3)
