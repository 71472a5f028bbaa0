"""The dump in TensorFlow's modes, compared with TensorFlow's own operators and fetches."""

# mypy: allow-untyped-calls
# TensorFlow has no types.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_tools.dump import Dump, Dumped

v1, raw = tf.compat.v1, tf.raw_ops
modes = pytest.mark.parametrize("mode", ["eager", "function", "session"])

_random = np.random.default_rng(0)
IMAGE = _random.normal(size=(2, 6, 6, 3)).astype(np.float32)
FILTER = _random.normal(size=(3, 3, 3, 4)).astype(np.float32)
MATRIX = _random.normal(size=(4 * 16, 5)).astype(np.float32)


def forward(x: Any, filters: Any, matrix: Any) -> list[Any]:
    """Return all intermediate values, computed with TensorFlow's own operators."""
    found = [raw.Conv2D(input=x, filter=filters, strides=[1] * 4, padding="VALID")]
    found.append(raw.Relu(features=found[-1]))
    found.append(raw.Reshape(tensor=found[-1], shape=[2, -1]))
    found.append(raw.MatMul(a=found[-1], b=matrix))
    return found


def dump(mode: str, program: Callable[..., Any], *arrays: Any, **options: Any) -> Dumped:
    tool = Dump(**options)
    if mode == "session":
        with tf.Graph().as_default(), v1.Session() as session:
            fed = [v1.placeholder(array.dtype, array.shape) for array in arrays]
            fetched = program(*fed)
            with amanda.apply(tool):
                session.run(fetched, dict(zip(fed, arrays, strict=True)))
    else:
        function = tf.function(program) if mode == "function" else program
        with amanda.apply(tool):
            function(*map(tf.constant, arrays))
    return tool.result().open()


def values(dumped: Dumped, **wanted: Any) -> list[Any]:
    """Return the values of the tensors with these attributes, of their own or their operator's."""
    found = []
    for tensor in dumped.index.tensors:
        facts = vars(dumped.index.ops[tensor.op]) | vars(tensor)
        if all(facts[name] == value for name, value in wanted.items()):
            found.append(dumped.read(tensor).array)
    return found


@modes
def test_values_are_those_of_raw_operators(mode: str) -> None:
    arrays = (IMAGE, FILTER, MATRIX)
    read = dump(mode, forward, *arrays, values=["inputs", "weights", "outputs"])
    expected = [value.numpy() for value in forward(*map(tf.constant, arrays))]
    kinds = ["Conv2D", "Relu", "Reshape", "MatMul"]
    for number, (kind, value) in enumerate(zip(kinds, expected, strict=True)):
        (found,) = values(read, type=kind, what="output")
        assert np.array_equal(found, value), kind
        (entered,) = values(read, type=kind, what="input", position="0")
        assert np.array_equal(entered, expected[number - 1] if number else IMAGE), kind
    assert np.array_equal(values(read, type="Conv2D", position="1")[0], FILTER)


@modes
def test_gradients_are_those_that_tensorflow_gives(mode: str) -> None:
    def program(x: Any, filters: Any, matrix: Any) -> Any:
        if mode == "session":
            made = forward(x, filters, matrix)
            return v1.gradients(tf.reduce_sum(made[-1] ** 2), [filters, matrix, *made])
        with tf.GradientTape() as tape:
            tape.watch([filters, matrix])
            made = forward(x, filters, matrix)
            loss = tf.reduce_sum(made[-1] ** 2)
        return tape.gradient(loss, [filters, matrix, *made])

    arrays = (IMAGE, FILTER, MATRIX)
    with tf.GradientTape() as tape:
        given = [tf.constant(array) for array in arrays]
        tape.watch(given)
        made = forward(*given)
        loss = tf.reduce_sum(made[-1] ** 2)
    filters, matrix, *arrived = (g.numpy() for g in tape.gradient(loss, [*given[1:], *made]))
    read = dump(mode, program, *arrays, values=["gradients"])
    assert np.array_equal(values(read, type="Conv2D", what="grad_input", position="1")[0], filters)
    assert np.array_equal(values(read, type="MatMul", what="grad_input", position="1")[0], matrix)
    for kind, gradient in zip(["Conv2D", "Relu", "Reshape", "MatMul"], arrived, strict=True):
        (found,) = values(read, type=kind, what="grad_output")
        assert np.array_equal(found, gradient), kind


@modes
def test_dtypes(mode: str) -> None:
    def program(x: Any) -> list[Any]:
        kinds = [tf.bfloat16, tf.float16, tf.int8, tf.bool]
        return [tf.cast(x, kind) for kind in kinds] + [tf.complex(x, -x), tf.as_string(x)]

    x = np.asarray([0.0, 1.5, -2.0], np.float32)
    read = dump(mode, program, x)
    found = {tensor.dtype: read.read(tensor).array for tensor in read.index.tensors}
    assert found["bfloat16"].tolist() == (x.view(np.uint32) >> 16).tolist()
    assert found["float16"].tolist() == x.tolist()
    assert found["int8"].tolist() == [0, 1, -2]
    assert found["bool"].tolist() == [False, True, True]
    assert found["complex64"].tolist() == (x - 1j * x).tolist()
    assert [left.reason for left in read.index.left_out] == ["dtype string"]


@modes
def test_weights_of_dense_layers(mode: str) -> None:
    made: list[Any] = []

    def program(x: Any) -> Any:
        if not made:
            initial = np.eye(2, dtype=np.float32)
            made.append(v1.get_variable("w", initializer=initial, use_resource=True))
            if mode == "session":
                v1.get_default_session().run(made[0].initializer)
        return tf.matmul(tf.matmul(x, made[0]), x)

    x = np.asarray([[1, 2], [3, 4]], np.float32)
    if mode != "session":
        made.append(tf.Variable(np.eye(2, dtype=np.float32)))
    read = dump(mode, program, x, values=["weights"])
    (weight,) = values(read, type="MatMul")
    assert weight.tolist() == [[1, 0], [0, 1]]


@modes
def test_executions(mode: str) -> None:
    def program(x: Any) -> Any:
        return tf.while_loop(lambda y: tf.reduce_sum(y) < 9.0, lambda y: (tf.square(y) + y,), (x,))

    read = dump(mode, program, np.ones(1, np.float32))
    assert [value.tolist() for value in values(read, type="Square")] == [[1], [4], [36]]
    executions = [t.execution for t in read.index.tensors if read.index.ops[t.op].type == "Square"]
    assert executions == [0, 1, 2]
