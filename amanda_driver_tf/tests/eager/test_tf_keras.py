"""tf_keras, which is Keras 2: its layers are scopes and its optimizers end steps, as in Keras 3."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda import OpContext
from amanda_core.testing.kit.tools import tool

keras = pytest.importorskip("tf_keras", reason="tf_keras is not installed")

# Of tf_keras 2.16, wherever it makes a seed.
pytestmark = pytest.mark.filterwarnings("ignore:non-integer arguments:DeprecationWarning")

IMAGES = np.random.default_rng(0).normal(size=(10, 6, 6, 2)).astype(np.float32)
CLASSES = np.arange(10) % 3


def made(run_eagerly: bool) -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((6, 6, 2)),
            keras.layers.Conv2D(4, 3, activation="relu", name="first"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Flatten(),
            keras.layers.Dense(3, name="head"),
        ],
        name="net",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], run_eagerly=run_eagerly)
    return model


def trained(model: Any) -> list[float]:
    history = model.fit(IMAGES, CLASSES, 4, epochs=2, verbose=0, shuffle=False).history
    return [*history["loss"], *model.evaluate(IMAGES, CLASSES, 4, verbose=0)]


@pytest.mark.parametrize("run_eagerly", [True, False], ids=["eager", "function"])
def test_training_and_evaluation_are_counted(run_eagerly: bool) -> None:
    counts: dict[str, int] = {}
    steps: list[str] = []

    def forward(context: OpContext) -> None:
        name = context.name
        if context["type"] in ("conv2d", "matmul"):
            context.insert_before_op(lambda *v: counts.update({name: counts.get(name, 0) + 1}))

    def backward(context: OpContext) -> None:
        name = context.op_type
        if name == "Conv2DBackpropFilter":
            context.insert_after_backward_op(
                lambda *v: counts.update({name: counts.get(name, 0) + 1})
            )

    counting = amanda.Tool()
    counting.add_inst_for_op(forward)
    counting.add_inst_for_op(backward, backward=True)
    counting.add_inst_for_step(None, lambda number: steps.append(f"end {number}"))
    plain = trained(made(run_eagerly))
    with amanda.apply(counting):
        assert trained(made(run_eagerly)) == plain
    if run_eagerly:
        # Two epochs of three batches, and three batches of evaluation.
        wanted = {"net/first/Conv2D": 9, "net/head/MatMul": 9, "Conv2DBackpropFilter": 6}
        assert counts == wanted
        assert len(steps) == 6
    else:
        # Fit and evaluate have a function each.
        assert sum(counts.values()) == 24
        assert counts["Conv2DBackpropFilter"] == 6
        assert len(steps) == 9


@pytest.mark.parametrize("run_eagerly", [True, False], ids=["eager", "function"])
def test_pruned_training_equals_a_model_masked_by_hand(run_eagerly: bool) -> None:
    def masked(context: OpContext) -> None:
        mask = half(context.value(1))
        context.insert_before_op(lambda w: w * mask, inputs=[1])
        context.insert_after_backward_op(lambda g: g * mask, grad_inputs=[1])

    def half(kernel: Any) -> Any:
        size = np.abs(kernel)
        return (size >= np.median(size)).astype(np.float32)

    with amanda.apply(tool(masked, "Conv2D")):
        found = trained(made(run_eagerly))
    model = made(True)
    kernel = model.get_layer("first").kernel
    kernel.assign(kernel * half(kernel.numpy()))
    kept = tf.constant(half(kernel.numpy()))

    apply_gradients = model.optimizer.apply_gradients
    model.optimizer.apply_gradients = lambda pairs, *args, **kwargs: apply_gradients(
        [(g * kept if v is kernel else g, v) for g, v in pairs], *args, **kwargs
    )
    np.testing.assert_allclose(found, trained(model), rtol=1e-5)


def test_ids_are_those_of_layers_and_optimizers_have_a_zone() -> None:
    model, seen = made(True), dict[str, set[Any]]()
    zones: dict[str, set[str]] = {}

    def note(context: OpContext) -> None:
        seen.setdefault(context.name, set()).add(context.op_id)
        zones.setdefault(context.zone, set()).add(context.op_type)

    with amanda.apply(tool(note)), amanda.cache_disabled():
        model(IMAGES)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(IMAGES, training=True))
        pairs = zip(
            tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True
        )
        keras.optimizers.SGD(0.1).apply_gradients(pairs)
    for name in ("net/first/Conv2D", "net/first/Relu", "net/head/MatMul"):
        assert len(seen[name]) == 1
    assert any("Assign" in op for op in zones["optimizer"])
    assert "Conv2D" in zones["model"]
