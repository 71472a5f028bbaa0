"""Optimizers, averages, metrics, clipping and data are zones, eagerly and in graphs alike."""

# mypy: allow-untyped-calls, allow-untyped-defs, disable-error-code="no-any-return"

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.testing.kit.tools import tool

X, Y = np.ones((2, 4), "float32"), np.zeros((2, 3), "float32")
MODES = pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])


def zones_of(program: Callable[[], object]) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    with amanda.apply(tool(lambda c: found.setdefault(c.zone, Counter()).update([c.op_type]))):
        program()
    return found


class Written(keras.optimizers.Optimizer):  # type: ignore[misc]
    """An optimizer of the user's, which multiplies matrices."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if len(variable.shape) == 2:
            gradient = tf.matmul(tf.matmul(gradient, gradient, transpose_b=True), gradient)
        variable.assign_sub(tf.cast(learning_rate, variable.dtype) * gradient)


class Agreement(keras.metrics.Metric):  # type: ignore[misc]
    """A metric of the user's, which multiplies matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
        self.total.assign(tf.reduce_mean(tf.matmul(y, prediction, transpose_b=True)))

    def result(self) -> Any:
        return tf.math.erf(self.total)


def agreement(y: Any, prediction: Any) -> Any:
    return tf.reduce_mean(tf.matmul(y, prediction, transpose_b=True), -1)


def net() -> Any:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


@MODES
def test_optimizers_of_users_and_clipping(traced: bool) -> None:
    model, optimizer = net(), Written(0.1)
    optimizer.build(model.trainable_variables)

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X) - Y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    found = zones_of(tf.function(step) if traced else step)
    assert found["model"]["MatMul"] == 1
    assert set(found["model"]) == {"ReadVariableOp", "MatMul", "BiasAdd", "Sub", "Pow", "Mean"}
    assert found["optimizer"]["MatMul"] == 2
    assert found["optimizer"]["L2Loss"] >= 1


@MODES
def test_metrics_of_users_in_fit(traced: bool) -> None:
    model = net()
    model.compile(
        Written(0.1),
        loss=lambda y, prediction: tf.reduce_mean(tf.square(tf.sin(prediction) - y)),
        metrics=[Agreement(), agreement],
        run_eagerly=not traced,
    )
    found = zones_of(lambda: model.fit(X, Y, verbose=0))
    assert found["model"]["MatMul"] == found["model"]["Sin"] == 1
    assert found["metrics"]["MatMul"] == found["optimizer"]["MatMul"] == 2
    assert "Erf" in found["metrics"]
    assert not {"AssignVariableOp", "IteratorGetNext"} & set(found["model"])


def test_a_metric_that_a_loop_updates_itself() -> None:
    metric = Agreement()

    def program() -> None:
        metric.update_state(Y, Y)
        metric.result()

    found = zones_of(program)
    assert found["metrics"]["MatMul"] == found["metrics"]["Erf"] == 1


@MODES
def test_zones_that_a_program_marks(traced: bool) -> None:
    def run(x: Any) -> Any:
        with amanda.zone("metrics"):
            y = tf.exp(x)
            with amanda.zone("model"):
                y = y + tf.sin(x)
            y = tf.math.erf(y)
        return tf.cos(x) + y

    found = zones_of(lambda: (tf.function(run) if traced else run)(tf.constant(X)))
    assert set(found["metrics"]) == {"Exp", "Erf"}
    assert {"Sin", "Cos"} <= set(found["model"])


@MODES
def test_averages_of_weights(traced: bool) -> None:
    variable, average = tf.Variable(tf.ones((3,))), tf.train.ExponentialMovingAverage(0.9)
    average.apply([variable])

    def step() -> None:
        tf.exp(variable)
        average.apply([variable])

    found = zones_of(tf.function(step) if traced else step)
    assert "Sub" in found["optimizer"]
    assert not {"Sub", "Mul", "AssignSubVariableOp"} & set(found.get("model", ()))


def test_optimizers_of_tensorflow_1_and_the_losses_that_they_call() -> None:
    v1 = tf.compat.v1
    weight, optimizer = tf.Variable(tf.ones((4, 3))), v1.train.MomentumOptimizer(0.1, 0.9)
    loss = lambda: tf.reduce_mean(tf.matmul(X, weight) ** 2)  # noqa: E731
    found = zones_of(lambda: optimizer.minimize(loss, var_list=[weight]))
    assert set(found["model"]) == {"ReadVariableOp", "MatMul", "Pow", "Mean"}
    assert "ResourceApplyMomentum" in found["optimizer"]
    with tf.Graph().as_default() as graph:
        inputs = v1.placeholder(tf.float32, (2, 4))
        weight = v1.get_variable("w", (4, 3))
        update = v1.train.AdamOptimizer().minimize(tf.reduce_mean(tf.matmul(inputs, weight) ** 2))
        average = v1.train.ExponentialMovingAverage(0.9).apply([weight])
        initial = v1.global_variables_initializer()

    def program() -> None:
        with v1.Session(graph=graph) as session:
            session.run(initial)
            session.run([update, average], {inputs: X})

    found = zones_of(program)
    assert found["model"]["MatMul"] == 1
    assert "ResourceApplyAdam" in found["optimizer"]
    assert "RandomUniform" in found["init"]
    assert not {"Sub", "AssignSubVariableOp", "RandomUniform"} & set(found["model"])
