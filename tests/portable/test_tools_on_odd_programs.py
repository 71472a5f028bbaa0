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
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import around

Hidden = Callable[[Any, Any], Any]
v1 = tf.compat.v1


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
@pytest.mark.parametrize("name", TOOLS | EDITING)
def test_convolutions_that_keras_compiles(name: str) -> None:
    wanted = fitted()
    tool = (TOOLS | EDITING)[name]()
    with amanda.apply(tool):
        found = fitted()
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    checked(name, tool)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A function that XLA should compile")
@pytest.mark.usefixtures("as_written")
def test_convolutions_that_keras_compiles_keep_their_bits_without_fusion() -> None:
    wanted = fitted()
    counts, tool = around()
    with amanda.apply(tool):
        assert fitted() == wanted
    assert any("Conv" in op for op, _ in counts)


def network(x: Any) -> tuple[Any, list[Any]]:
    """Return the results of two layers in the default graph, and the weights."""
    weights = [
        v1.get_variable(name, initializer=np.random.default_rng(seed).normal(size=size))
        for seed, (name, size) in enumerate({"w": (6, 8), "u": (8, 3)}.items())
    ]
    return tf.nn.relu(x @ weights[0]) @ weights[1], weights


def trained(session: Any, x: Any, fed: Any) -> list[Any]:
    result, weights = network(x)
    step = v1.train.AdamOptimizer(0.1).minimize(tf.reduce_mean(result**2))
    session.run(v1.global_variables_initializer())
    results = [session.run([result, step], {x: fed})[0] for _ in range(3)]
    return [*results, *session.run(weights)]


def loop_of_tensorflow_1(session: Any, x: Any, fed: Any) -> list[Any]:
    result, weights = network(x)
    v1.disable_control_flow_v2()
    try:
        start = (tf.constant(0), result)
        body = lambda i, h: (i + 1, tf.nn.relu(h @ tf.transpose(h) @ h))  # noqa: E731
        _, result = tf.while_loop(lambda i, _: i < 3, body, start)
        result = tf.cond(tf.reduce_sum(result) > 0, lambda: result * 2, lambda: result - 1)
        gradients = tf.gradients(result, weights)
    finally:
        v1.enable_control_flow_v2()
    session.run(v1.global_variables_initializer())
    return [value for _ in range(2) for value in session.run([result, *gradients], {x: fed})]


def in_parts(session: Any, x: Any, fed: Any) -> list[Any]:
    result, _ = network(x)
    factor = v1.placeholder(result.dtype, [])
    scaled = result * factor
    session.run(v1.global_variables_initializer())
    handle = session.partial_run_setup([result, scaled], [x, factor])
    first = session.partial_run(handle, result, {x: fed})
    return [first, session.partial_run(handle, scaled, {factor: 2.0})]


OF_SESSIONS = {"a training": trained, "a loop": loop_of_tensorflow_1, "in parts": in_parts}
#: Tools that edit inside the loop, whose gradient TensorFlow computes outside of it.
REFUSED = {("a loop", "inject_faults"), ("a loop", "steer"), ("a loop", "steer weights")}


def run_session(program: str) -> list[bytes]:
    """Return the results of a program as bytes."""
    fed = np.random.default_rng(2).normal(size=(4, 6))
    as_written = v1.ConfigProto()
    as_written.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Graph().as_default(), v1.Session(config=as_written) as session:
        x = v1.placeholder(tf.float64, [4, 6])
        return [np.asarray(value).tobytes() for value in OF_SESSIONS[program](session, x, fed)]


@pytest.mark.slow
@pytest.mark.parametrize("program", OF_SESSIONS)
def test_programs_of_sessions_run_as_without_them(program: str) -> None:
    expected = run_session(program)
    for name, make in (TOOLS | EDITING).items():
        tool = make()
        if (program, name) in REFUSED:
            outside = pytest.raises(UnsupportedError, match="loop or branch of TensorFlow 1")
            with outside, amanda.apply(tool):
                run_session(program)
            continue
        with amanda.apply(tool):
            found = run_session(program)
        assert found == expected, name
        checked(name, tool)


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
