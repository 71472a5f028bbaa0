"""Edits of lists, of one of several outputs, of other dtypes, and results that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.errors import PositionError, RoutineResultError
from amanda_core.testing.kit.tools import Edit, after, before, editing, tool

from ..comparison import close, equal
from .reference_programs import Ops, arrays, build, check, double, new_session, results, v1

KINDS = ("placeholder", "resource", "reference")


def dense(ops: Ops, x: Any, w: Any) -> Any:
    return ops("Sum", "loss", ops("Square", "square", ops("MatMul", "mm", x, w)))


def shifted(value: Any) -> Any:
    return value * 0.5 + 0.25


def test_a_list_is_one_position() -> None:
    values = arrays((2, 3), (2, 3), (2, 3))
    graph = tf.Graph()
    with graph.as_default():
        inputs = [tf.constant(v) for v in values]
        added = tf.add_n(inputs, name="added")
        joined = tf.concat(inputs, 0, name="joined")
        grads = tf.gradients(tf.reduce_sum(tf.square(joined)), inputs)

    def analyse(context: amanda.OpContext) -> None:
        if context.name in ("added", "joined"):
            context.insert_before_op(lambda parts: [parts[0] * 3, *parts[1:]], inputs=[0])

    with new_session(graph) as session, amanda.apply(tool(analyse)):
        found = session.run([added, joined, *grads])
    a, b, c = values
    close(found[0], 3 * a + b + c)
    close(found[1], np.concatenate([3 * a, b, c]))
    close(found[2:], [6 * a, 2 * b, 2 * c])


def test_one_of_several_outputs() -> None:
    (x,) = arrays((4, 3))
    graph = tf.Graph()
    with graph.as_default():
        inner = tf.constant(x)
        parts = tf.split(inner, [1, 3], name="parts")
        total = tf.reduce_sum(tf.square(parts[0])) + tf.reduce_sum(tf.exp(parts[1]))
        (grad,) = tf.gradients(total, inner)
    with (
        new_session(graph) as session,
        amanda.apply(editing(Edit("parts", "after", lambda v: v * 0.5, 1))),
    ):
        found = session.run([*parts, total, grad])
    close(found[:2], [x[:1], x[1:] * 0.5])
    close(found[3], np.concatenate([2 * x[:1], np.exp(x[1:] * 0.5)]))


def test_an_op_whose_gradient_is_its_second_output() -> None:
    (logits,) = arrays((4, 5))
    labels = np.array([0, 2, 4, 1])

    def probabilities(v: Any) -> Any:
        e = np.exp(v - v.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    graph = tf.Graph()
    with graph.as_default():
        given = tf.constant(logits)
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, given)
        (grad,) = tf.gradients(tf.reduce_sum(loss), given)
    onehot = np.eye(5, dtype=np.float32)[labels]
    kind = "SparseSoftmaxCrossEntropyWithLogits"
    with new_session(graph) as session:
        with amanda.apply(before(kind, shifted, 0)):
            found = session.run([loss, grad])
        with amanda.apply(after(kind, double, 0)):
            scaled = session.run([loss, grad])
        plain = session.run([loss, grad])
    p = probabilities(logits * 0.5 + 0.25)
    close(found, [-np.log(p[np.arange(4), labels]), p - onehot])
    close(scaled, [plain[0] * 2, plain[1]])


def test_batch_normalisation() -> None:
    x, scale = arrays((2, 4, 4, 3), (3,))

    def gradients(factor: float, behind: float) -> list[Any]:
        graph = tf.Graph()
        with graph.as_default():
            given, gamma = tf.constant(x), tf.constant(scale)
            edited = gamma + tf.stop_gradient(gamma * (factor - 1.0))
            y, _, _ = v1.nn.fused_batch_norm(given, edited, tf.zeros([3]), name="bn")
            y = y + tf.stop_gradient(y * (behind - 1.0))
            loss = tf.reduce_sum(tf.sin(y))
            fetches = [loss, *tf.gradients(loss, [given, gamma])]
        tools = [before("FusedBatchNormV3", double, 1), after("FusedBatchNormV3", double, 0)]
        with new_session(graph) as session:
            if factor != 1.0:
                return list(session.run(fetches))
            with amanda.apply(*tools):
                return list(session.run(fetches))

    close(gradients(1.0, 1.0), gradients(2.0, 2.0))


def test_a_convolution_and_what_follows() -> None:
    def program(ops: Ops, x: Any, w: Any, b: Any) -> Any:
        h = ops("Relu", "act", ops("BiasAdd", "bias", ops("Conv2D", "conv", x, w), b))
        return ops("Sum", "loss", ops("Square", "square", ops("MaxPool", "pool", h)))

    values = arrays((2, 4, 4, 3), (3, 3, 3, 2), (2,))
    for edits in (
        [Edit("conv", "before", shifted, 1)],
        [Edit("bias", "before", shifted, 1)],
        [Edit("pool", "before", shifted, 0)],
        [Edit("act", "after", shifted, 0), Edit("conv", "before", double, 0)],
        [Edit("pool", "after", shifted, 0)],
    ):
        check(program, values, edits, "resource")


def test_integers_booleans_and_strings() -> None:
    graph = tf.Graph()
    with graph.as_default():
        table = tf.constant([[1.0], [2.0], [3.0]])
        rows = tf.raw_ops.GatherV2(params=table, indices=[0, 1], axis=0, name="rows")
        (grad,) = tf.gradients(rows, table)
        chosen = tf.raw_ops.SelectV2(condition=[True, False], t=[1, 1], e=[2, 2], name="chosen")
        text = tf.strings.join(["a", "b"], name="text")
        half = tf.raw_ops.Neg(x=tf.constant([1.0, 2.0], tf.bfloat16), name="half")
        number = tf.raw_ops.Neg(x=tf.constant([1 + 2j], tf.complex64), name="number")
    tools = [
        before("rows", lambda indices: indices + 1, 1),
        before("chosen", tf.logical_not, 0),
        after("text", lambda value: value + tf.constant("c"), 0),
        before("half", double, 0),
        before("number", lambda value: value + 1, 0),
    ]
    with new_session(graph) as session, amanda.apply(*tools):
        found = session.run([rows, tf_dense(grad), chosen, text, half, number])
    equal(found[0], np.array([[2.0], [3.0]], np.float32))
    equal(found[1], np.array([[0.0], [1.0], [1.0]], np.float32))
    equal(found[2], np.array([2, 1], np.int32))
    assert found[3] == b"abc"
    assert found[4].astype(np.float32).tolist() == [-2.0, -4.0]
    assert found[5].tolist() == [-2 - 2j]


def tf_dense(gradient: Any) -> Any:
    with (
        gradient.values.graph.as_default() if isinstance(gradient, tf.IndexedSlices) else _Nothing()
    ):
        return tf.convert_to_tensor(gradient)


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


# Results that do not fit.


@pytest.mark.parametrize(
    "routine",
    [
        lambda value: tf.cast(value, tf.float64),
        lambda value: [value, value, value],
        lambda value: "no number",
    ],
)
def test_a_result_that_does_not_fit_is_refused(routine: Any) -> None:
    built = build(dense, arrays((4, 3), (3, 2)), None, "resource")
    with new_session(built.graph) as session:
        session.run(built.init)
        with amanda.apply(before("mm", routine, 1)), pytest.raises(RoutineResultError) as caught:
            results(session, built)
        assert "mm" in str(caught.value)
        results(session, built)


def test_numpy_and_python_numbers_fit() -> None:
    values = arrays((4, 3), (3, 2))
    built = build(dense, values, None, "resource")
    with new_session(built.graph) as session:
        session.run(built.init)
        with amanda.apply(before("mm", lambda w: w.numpy() * 2, 1)):
            found = results(session, built)
        with amanda.apply(before("mm", double, 1)):
            equal(found, results(session, built))


def test_a_position_that_is_not_there_is_refused() -> None:
    built = build(dense, arrays((4, 3), (3, 2)))
    with (
        new_session(built.graph) as session,
        amanda.apply(before("mm", double, 2)),
        pytest.raises(PositionError, match=r"inputs\[2\]"),
    ):
        results(session, built)
