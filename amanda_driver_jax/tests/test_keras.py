"""Keras on its JAX backend: a model is trained by `fit`, compiled or step by step."""

# mypy: no-warn-return-any

from __future__ import annotations

import collections
import os
from typing import Any

import jax
import numpy as np
import pytest

import amanda

os.environ["KERAS_BACKEND"] = "jax"

import keras

# Keras' variables have an older signature of this method.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning"),
    # From JAX 0.12 on, where Keras asks for the shape of its step counter.
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64"),
]

X = np.random.default_rng(0).standard_normal((8, 6, 6, 3)).astype("float32")
Y = np.arange(8) % 4
MODES = pytest.mark.parametrize("eagerly", [True, False], ids=["eager", "jit"])


def trained(eagerly: bool, activation: Any = "relu", tool: amanda.Tool | None = None) -> Any:
    """Return the losses of three epochs, the weights after them, and predictions."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Input((6, 6, 3)),
            keras.layers.Conv2D(4, 3, activation=activation),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=eagerly)

    def run() -> list[Any]:
        history = model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0)
        predicted = model.predict(X, batch_size=8, verbose=0)
        return [np.array(history.history["loss"]), *model.get_weights(), predicted]

    if tool is None:
        return run()
    with amanda.apply(tool):
        return run()


def assert_close(found: Any, wanted: Any) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@MODES
def test_a_tool_that_looks_sees_each_layer_in_each_step(eagerly: bool) -> None:
    calls: collections.Counter[str] = collections.Counter()

    def analyse(context: amanda.OpContext) -> None:
        kind = context["backward_type"] if context.is_backward() else context["type"]
        insert = (
            context.insert_after_backward_op if context.is_backward() else context.insert_after_op
        )
        insert(lambda *_: calls.update([kind]), observe=True)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    tool.add_inst_for_op(analyse, backward=True)
    found = trained(eagerly, tool=tool)
    assert_close(found, trained(eagerly))
    # Six steps of training, and one batch of predictions.
    assert (calls["conv2d"], calls["conv2d_backward"]) == (7, 6)
    assert calls["matmul"] >= 7
    before = dict(calls)
    trained(eagerly)
    assert dict(calls) == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:get_weights writes the model without the changes")
@pytest.mark.parametrize("staged", [True, False], ids=["staged", "host"])
@MODES
def test_an_edit_is_that_of_a_model_with_it(eagerly: bool, staged: bool) -> None:
    def half(x: Any) -> Any:
        return x * 0.5

    routine = amanda.staged(half) if staged else half

    def analyse(context: amanda.OpContext) -> None:
        if context["type"] == "relu":
            with amanda.autodiff_enabled():
                context.insert_after_op(routine)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    found = trained(eagerly, tool=tool)
    assert_close(found, trained(eagerly, lambda x: jax.nn.relu(x) * 0.5))
    assert np.abs(found[0] - trained(eagerly)[0]).max() > 1e-3
