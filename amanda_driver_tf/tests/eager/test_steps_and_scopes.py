"""Keras: layers are scopes, optimizers end steps, and training runs eagerly as without tools."""

# mypy: allow-subclassing-any, allow-untyped-calls, allow-untyped-decorators
# TensorFlow and Keras have no types.

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from amanda import OpContext, Tool, apply
from amanda_core.testing.kit.tools import idle, tool, watching

from .tensors import equal, normal

#: What is written under tools has none of their changes, and they say so.
pytestmark = pytest.mark.filterwarnings("ignore:.*without the changes of:amanda.AmandaWarning")


def scoped() -> tuple[list[str], Tool]:
    events: list[str] = []
    made = Tool()
    made.add_inst_for_scope(lambda p: events.append(f"+{p}"), lambda p: events.append(f"-{p}"))
    return events, made


def model() -> Any:
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, name="one"), keras.layers.Dense(1, name="two")],
        name="net",
    )


def test_layers_are_scopes() -> None:
    net = model()
    events, made = scoped()
    paths: list[str] = []
    watch = tool(lambda c: paths.append(c.module_path), "MatMul")
    with apply(made, watch):
        net(normal(2, 4))
        tf.exp(normal(2))
    assert events == ["+net", "+net/one", "-net/one", "+net/two", "-net/two", "-net"]
    assert paths == ["net/one", "net/two"]


def test_scope_is_left_by_an_exception() -> None:
    class Failing(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            raise ZeroDivisionError("of the layer")

    layer = Failing(name="failing")
    events, made = scoped()
    with apply(made):
        with pytest.raises(ZeroDivisionError):
            layer(normal(2))
        tf.exp(normal(2))
    assert events == ["+failing", "-failing"]


def test_nested_models() -> None:
    inner = keras.Sequential([keras.layers.Dense(2, name="deep")], name="inner")
    outer = keras.Sequential(
        [keras.Input((4,)), inner, keras.layers.ReLU(name="act")], name="outer"
    )
    names: list[str] = []
    with apply(tool(lambda c: names.append(c.name))):
        outer(normal(1, 4))
    assert "outer/inner/deep/MatMul" in names
    assert "outer/act/Relu" in names


def test_building_a_model_is_no_call_of_its_layers() -> None:
    events, made = scoped()
    with apply(made):
        inputs = keras.Input((2,))
        keras.Model(inputs, keras.layers.Dense(2)(inputs))
    assert events == []


def steps() -> tuple[list[str], Tool]:
    events: list[str] = []
    made = Tool()
    made.add_inst_for_step(
        lambda n: events.append(f"begin {n}"), lambda n: events.append(f"end {n}")
    )
    return events, made


def test_each_application_of_gradients_ends_a_step() -> None:
    net, x = model(), normal(2, 4)
    optimizer = keras.optimizers.Adam(0.1)
    events, made = steps()
    with apply(made):
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(net(x))
            grads = tape.gradient(loss, [v.value for v in net.trainable_variables])
            optimizer.apply_gradients(zip(grads, net.trainable_variables, strict=True))
    assert events == ["begin 0", "end 0", "begin 1", "end 1", "begin 2"]


def test_optimizer_in_an_optimizer_ends_one_step() -> None:
    net, x = model(), normal(2, 4)
    optimizer = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    events, made = steps()
    with apply(made):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(net(x)))
        grads = tape.gradient(loss, [v.value for v in net.trainable_variables])
        optimizer.apply_gradients(zip(grads, net.trainable_variables, strict=True))
    assert [event for event in events if event.startswith("end")] == ["end 0"]


def fitted(tools: Any) -> tuple[Any, Any]:
    keras.utils.set_random_seed(1)
    net = model()
    net.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", run_eagerly=True)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 4)).astype("f"), rng.normal(size=(8, 1)).astype("f")

    def run() -> Any:
        return net.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False).history["loss"]

    if tools is None:
        return run(), net.get_weights()
    with apply(*tools):
        return run(), net.get_weights()


def test_fit_runs_eagerly_as_without_tools() -> None:
    seen, watch = watching()
    events, made = steps()
    equal(fitted([idle(), watch, made]), fitted(None))
    assert seen.count("MatMul") == 2 * 4
    assert events.count("end 3") == 1
    assert "end 4" not in events


def test_pruned_fit_equals_a_hand_masked_one() -> None:
    mask = np.array([[1, 0, 1]] * 4, np.float32)

    def prune(context: OpContext) -> None:
        if context.module_path.endswith("/one"):
            context.insert_before_op(lambda w: w * mask, inputs=[1])
            context.insert_after_backward_op(lambda g: g * mask, grad_inputs=[1])

    losses, _ = fitted([tool(prune, "MatMul")])

    class Masked(keras.layers.Dense):
        def call(self, x: Any) -> Any:
            return tf.matmul(x, self.kernel.value * mask) + self.bias.value

    keras.utils.set_random_seed(1)
    net = keras.Sequential(
        [keras.Input((4,)), Masked(3, name="one"), keras.layers.Dense(1, name="two")]
    )
    net.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", run_eagerly=True)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 4)).astype("f"), rng.normal(size=(8, 1)).astype("f")
    expected = net.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False).history["loss"]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
