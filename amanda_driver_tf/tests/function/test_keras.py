"""Keras models: training and inference under tools, against models with edits built in."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.testing.kit.tools import Everywhere, analysed, before, watching, watching_backward

from ..comparison import close, equal
from .reference_programs import as_written, straight, values

INPUTS, TARGETS = values((8, 3), (8, 2), dtype=tf.float32)
MASK = tf.constant([[1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0]])

pytestmark = [
    pytest.mark.filterwarnings("ignore::amanda.AmandaWarning"),
    # Of h5py and Keras about NumPy.
    pytest.mark.filterwarnings("ignore:__array__:DeprecationWarning"),
]


def half(value: Any) -> Any:
    return value * 0.5 + 0.1


class Edited(keras.layers.Dense):  # type: ignore[misc]
    """A dense layer that computes with the edited kernel."""

    def call(self, x: Any) -> Any:
        kernel = straight(tf.convert_to_tensor(self.kernel), half)
        return self.activation(tf.matmul(x, kernel) + self.bias)


@amanda.staged
def staged_half(value: Any) -> Any:
    return value * 0.5 + 0.1


def model(dense: Any, **kwargs: Any) -> Any:
    keras.utils.set_random_seed(0)
    made = keras.Sequential([dense(4, activation="relu", name="one"), dense(2, name="two")])
    made.build((None, 3))
    made.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **kwargs)
    return made


def numbers(made: Any) -> list[Any]:
    history = made.fit(INPUTS, TARGETS, epochs=2, batch_size=4, shuffle=False, verbose=0)
    return [
        np.float32(history.history["loss"]),
        np.float32(made.evaluate(INPUTS, TARGETS, verbose=0)),
        made.predict(INPUTS, verbose=0),
        *made.get_weights(),
    ]


CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"steps_per_execution": 2},
    {"jit_compile": True},
    {"run_eagerly": True},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configuration", "staged"),
    [*((configuration, False) for configuration in CONFIGURATIONS), ({"jit_compile": True}, True)],
    ids=str,
)
def test_training_under_a_tool(configuration: dict[str, Any], staged: bool) -> None:
    wanted = numbers(model(Edited, **configuration))
    made = model(keras.layers.Dense, **configuration)
    with amanda.apply(before("MatMul", staged_half if staged else half, 1)):
        found = numbers(made)
    close(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("scaled", [False, True], ids=["AdamW", "LossScaleOptimizer"])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_watching_changes_no_bit_in_mixed_precision(
    policy: str, scaled: bool, eagerly: bool
) -> None:
    def trained() -> list[Any]:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(4, "relu", dtype=policy), keras.layers.Dense(2, dtype=policy)]
        made = keras.Sequential([keras.layers.Input((3,)), *layers])
        optimizer = keras.optimizers.AdamW(0.01)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        made.compile(optimizer, "mse", run_eagerly=eagerly)
        losses = [np.float32(made.train_on_batch(INPUTS, TARGETS)) for _ in range(2)]
        return [*losses, *numbers(made)]

    calls: list[int] = []
    with as_written():
        plain = trained()
        with amanda.apply(Everywhere(lambda *values: calls.append(1))):
            watched = trained()
    assert calls
    equal(watched, plain)


@pytest.mark.slow
def test_a_model_that_ran_before() -> None:
    made, reference = model(keras.layers.Dense), model(Edited)
    made.fit(INPUTS, TARGETS, verbose=0)
    made.predict(INPUTS, verbose=0)
    reference.set_weights(made.get_weights())
    reference.optimizer.build(reference.trainable_variables)
    for mine, other in zip(reference.optimizer.variables, made.optimizer.variables, strict=True):
        mine.assign(other)
    wanted = numbers(reference)
    with amanda.apply(before("MatMul", half, 1)):
        found = numbers(made)
    close(found, wanted)
    plain = model(keras.layers.Dense)
    plain.set_weights(made.get_weights())
    close(made.predict(INPUTS, verbose=0), plain.predict(INPUTS, verbose=0))


def test_pruning_of_one_layer_with_a_mask_made_of_its_weights() -> None:
    made = model(keras.layers.Dense)
    kernel = made.layers[0].kernel.numpy()

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type != "MatMul" or "one" not in context.name:
            return
        weight = context.value(1)
        np.testing.assert_array_equal(weight, kernel)
        mask = tf.cast(tf.abs(weight) > 0.5, tf.float32)
        context.insert_before_op(lambda w: w * mask, inputs=[1])
        context.insert_after_backward_op(lambda g: g * mask, grad_inputs=[1])

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        made.fit(INPUTS, TARGETS, epochs=2, batch_size=4, verbose=0)
    pruned = np.abs(kernel) <= 0.5
    assert pruned.any()
    np.testing.assert_array_equal(made.layers[0].kernel.numpy()[pruned], kernel[pruned])
    assert (made.layers[0].kernel.numpy()[~pruned] != kernel[~pruned]).all()


def test_counts_of_convolutions() -> None:
    keras.utils.set_random_seed(0)
    made = keras.Sequential(
        [keras.layers.Conv2D(2, 3, padding="same", activation="relu") for _ in range(3)]
        + [keras.layers.BatchNormalization(), keras.layers.GlobalAveragePooling2D()]
    )
    made.build((None, 4, 4, 2))
    made.compile("sgd", "mse")
    (images,) = values((2, 4, 4, 2), dtype=tf.float32)
    seen, watch = watching()
    pairs, watch_backward = watching_backward()
    contexts, watch_contexts = analysed()
    with amanda.apply(watch, watch_backward, watch_contexts):
        made.fit(images, tf.zeros((2, 2)), batch_size=1, verbose=0)
    assert seen.count("Conv2D") == 3 * 2
    assert pairs.count(("Conv2DBackpropFilter", "Conv2D")) == 3 * 2
    assert pairs.count(("Conv2DBackpropInput", "Conv2D")) == 2 * 2
    convolutions = [c for c in contexts if c.op_type == "Conv2D"]
    assert len({c.get_op_id() for c in convolutions}) == 3
    updates = [c for c in contexts if c.zone == "optimizer"]
    assert updates
    assert {c.zone for c in convolutions} == {"model"}


def test_models_of_the_same_architecture_have_ops_of_their_own() -> None:
    contexts, watch = analysed()
    models = [model(keras.layers.Dense) for _ in range(2)]
    with amanda.apply(watch):
        for made in models:
            made.predict(INPUTS, verbose=0)
            made.predict(INPUTS, verbose=0)
    numbers_ = [c.get_op_id() for c in contexts if c.op_type == "MatMul"]
    assert len(numbers_) == len(set(numbers_)) == 4


def test_files_written_under_a_tool_know_nothing_of_it(tmp_path: Any) -> None:
    made = model(keras.layers.Dense)
    with amanda.apply(before("MatMul", half, 1)):
        made.fit(INPUTS, TARGETS, verbose=0)
        made.save(tmp_path / "model.keras")
        made.save_weights(tmp_path / "model.weights.h5")
        made.export(tmp_path / "exported", verbose=False)
        tf.train.Checkpoint(model=made).save(str(tmp_path / "checkpoint"))
    for file in tmp_path.rglob("*"):
        if file.is_file():
            content = file.read_bytes().lower()
            assert b"amanda" not in content
            assert b"eagerpyfunc" not in content
    plain = made.predict(INPUTS, verbose=0)
    close(keras.models.load_model(tmp_path / "model.keras").predict(INPUTS, verbose=0), plain)
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    close(exported.serve(INPUTS), plain)
