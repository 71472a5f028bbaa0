"""`quantize` and `sensitivity` in TensorFlow: the same source, grids by NumPy's arithmetic."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest

import amanda
from amanda_tools.faults import InjectFaults, run_campaign
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


@pytest.mark.parametrize("graph", [False, True])
def test_a_campaign_of_a_program_of_tensorflow_counts_outcomes(graph: bool) -> None:
    run, x, _kernel, _ = network()
    program = tf.function(run) if graph else run
    tool = InjectFaults(["matmul"], model="value", amount=1e9, mode="per_run")
    found = run_campaign(tool, lambda: program(x), 5)
    assert [trial.faults for trial in found.trials] == [1] * 5
    assert all(trial.distance == pytest.approx(1e9) for trial in found.trials)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_present_scales_in_tensorflow_are_those_of_what_is_finite(value: float) -> None:
    x = numpy.random.default_rng(0).standard_normal((2, 6)).astype("float32")
    weight = tf.Variable(numpy.random.default_rng(1).standard_normal((6, 4)).astype("float32"))
    x[0, 0] = value
    with amanda.apply(Quantize("dynamic", weights="none")):
        found = tf.matmul(tf.constant(x), weight)
    row = rounded(x[1], abs(x[numpy.isfinite(x)]).max(), 127.0)
    numpy.testing.assert_allclose(found[1], row @ weight.numpy(), rtol=1e-4, atol=1e-5)


def test_keras_recurrent_layers_are_calibrated_by_all_their_steps() -> None:
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    layer, x = keras.layers.LSTM(4), numpy.random.default_rng(0).standard_normal((2, 5, 6))
    tool = Quantize()
    with amanda.apply(tool):
        real, quantized = layer(x), layer(x)
    assert float(tf.reduce_max(abs(quantized - real))) < 0.02
    states = [one for one in tool.result().activations if one.low != 0 and one.operand == "left"]
    assert {one.seen for one in states} == {1}


def test_kernels_that_keras_reshapes_are_quantized_as_weights() -> None:
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    layer = keras.layers.EinsumDense("abc,cde->abde", (None, 2, 4))
    x = numpy.random.default_rng(0).standard_normal((2, 5, 8)).astype("float32")
    layer(x)
    tool = Quantize(weights="int4", activations="none")
    with amanda.apply(tool):
        found = layer(x)
    kernel = layer.kernel.numpy().reshape(8, 8)
    wanted = x.reshape(-1, 8) @ rounded(kernel, abs(kernel).max(0), 7.0)
    numpy.testing.assert_allclose(found.numpy().reshape(-1, 8), wanted, rtol=1e-4, atol=1e-5)
    result = tool.result()
    assert result.parameters == result.reached == 64


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_weights_that_a_graph_casts_are_weights_of_the_result(method: Any) -> None:
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(size, dtype="mixed_bfloat16") for size in (4, 2)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    x = numpy.random.default_rng(0).standard_normal((3, 5)).astype("float32")
    plain = model.predict(x, verbose=0)
    with amanda.apply(tool := Quantize(method, weights="int4", activations="none")):
        found = model.predict(x, verbose=0)
    assert not numpy.array_equal(found, plain)
    kernels = [one.path for one in model.trainable_variables if one.path.endswith("kernel")]
    assert [weight.name for weight in tool.result().weights] == kernels
    assert str(tool.result().table()).startswith(f"{method}: 2 weights and 0 other operands")


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
