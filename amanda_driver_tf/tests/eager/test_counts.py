"""What is seen of a program: each op once, its variables' reads, its backward ops."""

# mypy: allow-subclassing-any, allow-untyped-calls, allow-untyped-decorators
# TensorFlow and Keras have no types.

from __future__ import annotations

from collections import Counter
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from amanda import OpContext, apply, attach, cache_disabled, disabled
from amanda_core.testing.kit import tools
from amanda_driver_tf.identity.namespaces import EAGER

from . import tensors


def small_model() -> Any:
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            keras.layers.Conv2D(3, 3, name="first"),
            keras.layers.ReLU(name="act"),
            keras.layers.Conv2D(3, 3, name="second"),
            keras.layers.Flatten(name="flat"),
            keras.layers.Dense(2, name="head"),
        ],
        name="net",
    )


def gradients(model: Any, x: tf.Tensor) -> list[Any]:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(model(x)))
    return list(tape.gradient(loss, [v.value for v in model.trainable_variables]))


def test_ops_of_a_keras_model_are_counted_in_every_execution() -> None:
    model, x = small_model(), tensors.normal(2, 6, 6, 2)
    seen, tool = tools.watching()
    with apply(tool):
        for _ in range(3):
            seen.clear()
            model(x)
            counted = Counter(seen)
            assert counted["Conv2D"] == 2
            assert counted["MatMul"] == 1
            assert counted["Relu"] == 1
            assert counted["ReadVariableOp"] == 6
            assert counted["BiasAdd"] == 3


def test_backward_ops_belong_to_their_forward_ops() -> None:
    model, x = small_model(), tensors.normal(2, 6, 6, 2)
    seen, tool = tools.watching_backward()
    with apply(tool):
        for _ in range(3):
            seen.clear()
            gradients(model, x)
            counted = Counter(seen)
            assert counted["Conv2DBackpropFilter", "Conv2D"] == 2
            # TensorFlow computes the gradient of the model's input, too.
            assert counted["Conv2DBackpropInput", "Conv2D"] == 2
            assert counted["MatMul", "MatMul"] == 2
            assert counted["ReluGrad", "Relu"] == 1
            assert counted["BiasAddGrad", "BiasAdd"] == 3
            # Only sums of gradients belong to no op.
            assert {op for op, forward in counted if forward is None} <= {"AddN"}


def test_seen_as_many_gradient_ops_as_tensorflow_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.eager import imperative_grad

    model, x = small_model(), tensors.normal(2, 6, 6, 2)
    gradients(model, x)
    ran: list[str] = []
    inside: list[bool] = []
    fast, differentiate = pywrap_tfe.TFE_Py_FastPathExecute, imperative_grad.imperative_grad

    def note(ctx: Any, op: str, name: Any, *args: Any) -> Any:
        if inside:
            ran.append(op)
        return fast(ctx, op, name, *args)

    def note_pass(*args: Any, **kwargs: Any) -> Any:
        inside.append(True)
        try:
            return differentiate(*args, **kwargs)
        finally:
            inside.pop()

    with monkeypatch.context() as patch:
        patch.setattr(pywrap_tfe, "TFE_Py_FastPathExecute", note)
        patch.setattr(imperative_grad, "imperative_grad", note_pass)
        gradients(model, x)
    seen, tool = tools.watching_backward()
    with apply(tool):
        gradients(model, x)
    assert Counter(op for op, _ in seen) == Counter(ran)


def test_variables_given_to_an_op_are_read_visibly_and_the_op_counts_once() -> None:
    v, x = tensors.variable(3), tensors.normal(3)
    seen, tool = tools.watching()
    with apply(tool):
        for _ in range(2):
            seen.clear()
            tensors.equal(tf.multiply(x, v), x * v.value())
            assert seen == ["ReadVariableOp", "Mul", "ReadVariableOp", "Mul"]


def test_reads_are_seen_although_nothing_else_is_wanted_of_the_op() -> None:
    v, x = tensors.variable(3), tensors.normal(3)
    read: list[Any] = []
    tool = tools.before("ReadVariableOp", lambda handle: read.append(handle.dtype))
    with apply(tool):
        for _ in range(3):
            tf.multiply(x, v)
    assert read == [tf.resource] * 3


def test_read_of_a_variable_can_be_edited() -> None:
    v, x = tensors.variable(3), tensors.normal(3)
    expected = x * (v * 2.0)
    with apply(tools.after("ReadVariableOp", lambda value: value * 2.0)):
        for _ in range(2):
            with tf.GradientTape() as tape:
                y = tf.multiply(x, v)
            tensors.equal(y, expected)
            tensors.equal(tape.gradient(y, v), x)


def test_context_has_the_ops_facts() -> None:
    x, v = tensors.normal(1, 4, 4, 1), tensors.variable(2, 2, 1, 1)
    found: dict[str, Any] = {}

    def analyse(context: OpContext) -> None:
        op = context.get_op()
        found.update(
            name=op.name,
            type=op.type,
            dunder=op.__name__,
            positions=context.input_names,
            namespace=context.namespace,
            padding=op.get_attr("padding"),
            strides=context.attrs["strides"],
            dtype=context.attrs["T"],
            inputs=[tuple(i.shape) for i in op.inputs],
            value=context.value(1),
            data=context.value(0),
            outputs=None if context.outputs is None else len(context.outputs),
            source=context.source,
        )

    with apply(tools.tool(analyse, "Conv2D")):
        tf.nn.conv2d(x, v, 1, "SAME")
    assert found["name"] == found["type"] == found["dunder"] == "Conv2D"
    assert found["positions"] == ("input", "filter")
    assert found["namespace"] == EAGER
    assert found["padding"] == b"SAME"
    assert found["strides"] == [1, 1, 1, 1]
    assert found["dtype"] == tf.float32
    assert found["inputs"] == [(1, 4, 4, 1), (2, 2, 1, 1)]
    tensors.equal(found["value"], v)
    assert found["data"] is None
    assert found["source"].startswith("test_counts.py:")


def test_raw_op_holds_no_tensor_afterwards() -> None:
    import gc
    import weakref

    from amanda_core.errors import StaleContextError

    kept: list[Any] = []
    with apply(tools.tool(lambda context: kept.append(context.get_op()), "Relu")):
        x = tf.constant(np.ones(3, np.float32))
        y = tf.nn.relu(x)
        dead = [weakref.ref(x), weakref.ref(y)]
        del x, y
        gc.collect()
        assert [ref() for ref in dead] == [None, None]
        with pytest.raises(StaleContextError):
            _ = kept[0].inputs


def test_list_of_tensors_is_one_position() -> None:
    a, b = tensors.normal(2), tensors.normal(2, seed=1)
    shapes: list[Any] = []

    def analyse(context: OpContext) -> None:
        shapes.append([len(i) if isinstance(i, list) else None for i in context.inputs])
        context.insert_before_op(lambda values: [values[1], values[0]], inputs=[0])

    with apply(tools.tool(analyse, "ConcatV2")):
        tensors.equal(tf.concat([a, b], 0), np.concatenate([b.numpy(), a.numpy()]))
    assert shapes == [[2, None]]


def test_constants_written_by_the_program_have_a_value_and_computed_ones_none() -> None:
    found: list[Any] = []
    x = tensors.normal(2, 3)

    def analyse(context: OpContext) -> None:
        found.append((context.value(0), None if context.value(1) is None else 1))

    with apply(tools.tool(analyse, "Sum")):
        tf.reduce_sum(x, axis=[1])
        tf.reduce_sum(x, axis=tf.range(1))
    assert found == [(None, 1), (None, None)]


@pytest.mark.parametrize("read", ["value", "identity", "cast", "read_value"])
def test_value_of_a_variable_is_found_through_what_only_passes_it_on(read: str) -> None:
    v, x = tensors.variable(2, 2), tf.cast(tensors.normal(2, 2), tf.float16)
    ways = {
        "value": lambda: tf.cast(v, tf.float16),
        "identity": lambda: tf.cast(tf.identity(v), tf.float16),
        "cast": lambda: tf.identity(tf.cast(v.value(), tf.float16)),
        "read_value": lambda: tf.cast(v.read_value(), tf.float16),
    }
    found: list[Any] = []
    with apply(tools.tool(lambda c: found.append(c.value(1)), "MatMul"), tools.idle()):
        for _ in range(3):
            tf.matmul(x, ways[read]())
            tf.linalg.matmul(x, ways[read]())
    assert len(found) == 2
    for value in found:
        tensors.equal(value, tf.cast(v, tf.float16))


def test_nothing_is_seen_while_disabled_or_in_routines_or_analysis() -> None:
    x = tensors.normal(2)
    seen, tool = tools.watching()
    inner = tools.before("Relu", lambda value: tf.exp(tf.tanh(value)))
    with apply(tool, inner):
        with disabled():
            tf.nn.relu(x)
        assert seen == []
        tf.nn.relu(x)
        assert seen == ["Relu"]


def test_analysis_runs_once_and_with_the_cache_off_each_time() -> None:
    x = tensors.normal(2)
    analysed: list[str] = []
    with apply(tools.tool(lambda context: analysed.append(context.op_type))):
        for _ in range(3):
            tf.nn.relu(x)
        assert analysed == ["Relu"]
        with cache_disabled():
            for _ in range(2):
                tf.nn.relu(x)
        assert analysed == ["Relu"] * 3


def test_invalidated_tool_analyses_again() -> None:
    x = tensors.normal(2)
    analysed: list[str] = []
    tool = tools.tool(lambda context: analysed.append(context.op_type))
    with apply(tool):
        for _ in range(2):
            for _ in range(2):
                tf.nn.relu(x)
            tool.invalidate()
    assert analysed == ["Relu", "Relu"]


def test_composite_tensors_pass() -> None:
    ragged = tf.ragged.constant([[1.0, -2.0], [3.0]])
    sparse = tf.sparse.from_dense([[0.0, 2.0], [1.0, 0.0]])
    dense = tensors.normal(2, 2)
    plain = (tf.nn.relu(ragged), tf.sparse.sparse_dense_matmul(sparse, dense), ragged + 1.0)
    seen, tool = tools.watching()
    with apply(tool):
        mine = (tf.nn.relu(ragged), tf.sparse.sparse_dense_matmul(sparse, dense), ragged + 1.0)
    assert mine[0].to_list() == plain[0].to_list()
    tensors.equal(mine[1], plain[1])
    assert mine[2].to_list() == plain[2].to_list()
    assert seen.count("Relu") == 1
    assert "SparseTensorDenseMatMul" in seen


def test_python_in_an_op_is_one_op() -> None:
    x = tensors.normal(3)
    seen, tool = tools.watching()

    def body(value: tf.Tensor) -> tf.Tensor:
        return tf.exp(tf.tanh(value))

    with apply(tool):
        for _ in range(2):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.py_function(body, [x], tf.float32)
            grad = tape.gradient(y, x)
    assert seen == ["EagerPyFunc", "EagerPyFunc"]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = body(x)
    tensors.close(grad, tape.gradient(y, x))


def test_data_pipelines_are_not_the_model() -> None:
    seen, tool = tools.watching()
    with apply(tool):
        data = tf.data.Dataset.from_tensor_slices([1.0, 2.0]).map(lambda v: v * 2.0)
        assert [float(value) for value in data] == [2.0, 4.0]
    assert seen == []


def test_arrays_and_numbers_mix() -> None:
    x = tensors.normal(3)
    array = np.arange(3, dtype=np.float32)
    plain = tf.maximum(x * array + 1.0, array)
    _, tool = tools.watching()
    with apply(tool):
        tensors.equal(tf.maximum(x * array + 1.0, array), plain)
        tensors.equal(np.exp(tf.nn.relu(x)), np.exp(tf.nn.relu(x).numpy()))


def test_attach_gives_the_same_as_apply() -> None:
    seen, tool = tools.watching()
    handle = attach(tool)
    tf.nn.relu(tensors.normal(2))
    handle.remove()
    tf.nn.relu(tensors.normal(2))
    assert seen == ["Relu"]
    assert "tensorflow" not in handle.coverage()
