"""Every tool on unusual TensorFlow programs: no tool fails or changes them."""

# mypy: allow-untyped-calls
# TensorFlow has no types.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from every_tool import EDITING, TOOLS, checked

import amanda
from amanda_core.testing.tools import around

Hidden = Callable[[Any, Any], Any]


def assigned(x: Any, first: Any) -> Any:
    first.assign_add(first * 0)
    return x @ first


def looped(x: Any, first: Any) -> Any:
    start = (tf.constant(0), x @ first)
    return tf.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, tf.nn.relu(h)), start)[1]


#: What a network does between its two layers, with four samples.
PROGRAMS: dict[str, Hidden] = {
    "a number drawn for all": lambda x, w: x @ w + tf.random.stateless_uniform((), (1, 2)),
    "the first sample for all": lambda x, w: x @ w + (x @ w)[:1],
    "no samples": lambda x, w: x[:0] @ w,
    "sparse": lambda x, w: tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(tf.eye(4)), x @ w),
    "ragged": lambda x, w: tf.RaggedTensor.from_tensor(x @ w).to_tensor(),
    "strings": lambda x, w: x @ w + tf.strings.to_number(tf.strings.as_string(tf.range(8))),
    "complex": lambda x, w: tf.abs(tf.signal.fft(tf.cast(x @ w, tf.complex64))),
    "a variable written": assigned,
    "a loop": looped,
}


def run(hidden: Hidden, graph: bool) -> list[bytes]:
    """Return the results of two steps as bytes."""
    first, second = (
        tf.Variable(np.random.default_rng(seed).normal(size=size).astype(np.float32))
        for seed, size in enumerate([(6, 8), (8, 3)])
    )

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            result = hidden(x, first) @ second
            loss = tf.reduce_sum(result**2)
        return [result, *tape.gradient(loss, [first, second])]

    x = tf.constant(np.random.default_rng(2).normal(size=(4, 6)).astype(np.float32))
    ready = tf.function(step) if graph else step
    return [tf.convert_to_tensor(value).numpy().tobytes() for _ in range(2) for value in ready(x)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_runs_as_without_them(program: str, mode: str) -> None:
    expected = run(PROGRAMS[program], mode == "function")
    for name, make in (TOOLS | EDITING).items():
        tool = make()
        with amanda.apply(tool):
            found = run(PROGRAMS[program], mode == "function")
        assert found == expected, name
        checked(name, tool)


def fitted() -> list[float]:
    """Return the losses of a model that Keras compiles with XLA, because the CPU lacks the
    kernels.
    """
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((4, 4, 4, 4)),
            keras.layers.Conv3D(6, 2, groups=2, data_format="channels_first"),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    model.compile("sgd", "mse")
    x, y = np.ones((4, 4, 4, 4, 4), np.float32), np.ones((4, 2), np.float32)
    losses: list[float] = model.fit(x, y, epochs=2, verbose=0).history["loss"]
    return losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A function that XLA should compile")
@pytest.mark.parametrize("name", TOOLS)
def test_convolutions_that_keras_compiles(name: str) -> None:
    wanted = fitted()
    tool = TOOLS[name]()
    with amanda.apply(tool):
        found = fitted()
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    checked(name, tool)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A function that XLA should compile")
def test_convolutions_that_keras_compiles_keep_their_bits_without_fusion() -> None:
    # TensorFlow's graph optimizer fuses what no routine stands between; oneDNN is off in all tests.
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        wanted = fitted()
        counts, tool = around()
        with amanda.apply(tool):
            assert fitted() == wanted
        assert any("Conv" in op for op, _ in counts)
    finally:
        off = before.get("disable_meta_optimizer", False)
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": off})


def test_references_to_variables_without_a_value() -> None:
    tool = TOOLS["effective_path"]()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        name, start = "of_references", np.ones((3, 2), np.float32)
        with tf.compat.v1.variable_scope(name, use_resource=False):
            weight = tf.compat.v1.get_variable("w", initializer=start)
        x = tf.compat.v1.placeholder(tf.float32, [None, 3])
        result = tf.nn.relu(x @ weight)
        with amanda.apply(tool):
            session.run(weight.initializer)
            found = session.run(result, {x: start[:, :1].T})
    assert found.tolist() == [[3.0, 3.0]]
    checked("effective_path", tool)
