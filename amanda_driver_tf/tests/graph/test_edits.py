"""Forward edits pass straight through; the oracle is a twin graph that has them written in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.errors import PositionError, RoutineResultError

from .making import (
    Edit,
    Ops,
    after,
    arrays,
    before,
    build,
    check,
    close,
    double,
    editing,
    equal,
    new_session,
    results,
    staged,
    tool,
    v1,
)

KINDS = ("placeholder", "resource", "reference")


def dense(ops: Ops, x: Any, w: Any) -> Any:
    return ops("Sum", "loss", ops("Square", "square", ops("MatMul", "mm", x, w)))


def shifted(value: Any) -> Any:
    return value * 0.5 + 0.25


# Single ops.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("position", [0, 1, None])
def test_inputs(kind: str, position: int | None) -> None:
    routine: Callable[..., Any] = shifted
    if position is None:

        def routine(*values: Any) -> Any:
            return [shifted(v) for v in values] if len(values) > 1 else shifted(values[0])

    check(dense, arrays((4, 3), (3, 2)), [Edit("mm", "before", routine, position)], kind)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs(kind: str) -> None:
    check(dense, arrays((4, 3), (3, 2)), [Edit("mm", "after", shifted, 0)], kind)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gated_gradients(kind: str, gate: bool) -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        h = ops("Tanh", "act", ops("MatMul", "mm", x, w))
        return ops("Sum", "loss", ops("AddV2", "sum", h, ops("MatMul", "mm2", h, w)))

    for edit in (Edit("mm", "before", double, 1), Edit("mm", "after", shifted, 0)):
        check(program, arrays((3, 3), (3, 3)), [edit], kind, gate_gradients=gate)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_edited_in_one_of_its_readers(kind: str) -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        h = ops("Tanh", "act", ops("MatMul", "mm1", x, w))
        return ops("Sum", "loss", ops("MatMul", "mm2", h, w))

    check(program, arrays((4, 3), (3, 3)), [Edit("mm2", "before", shifted, 1)], kind)


def test_a_value_read_by_the_edited_op_and_by_others() -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        h = ops("Sigmoid", "act", ops("MatMul", "mm", x, w))
        left, right = ops("Exp", "exp", h), ops("Square", "square", h)
        return ops("Sum", "loss", ops("Mul", "mul", left, right))

    for edit in (
        Edit("exp", "before", shifted, 0),
        Edit("square", "before", shifted, 0),
        Edit("act", "after", shifted, 0),
        Edit("mul", "before", shifted, 1),
        Edit("exp", "after", double, 0),
    ):
        check(program, arrays((4, 3), (3, 3)), [edit])


# One tensor several times.


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("op_type", ["AddV2", "Mul", "Sub", "RealDiv", "Maximum"])
def test_a_tensor_twice_with_one_position_edited(op_type: str, position: int) -> None:
    def program(ops: Ops, x: Any) -> Any:
        y = ops("Exp", "exp", x)
        return ops("Sum", "loss", ops("Square", "square", ops(op_type, "twice", y, y)))

    check(program, arrays((3, 4)), [Edit("twice", "before", shifted, position)])


@pytest.mark.parametrize("op_type", ["AddV2", "Mul"])
def test_a_tensor_twice_with_both_positions_edited_differently(op_type: str) -> None:
    def program(ops: Ops, x: Any) -> Any:
        y = ops("Exp", "exp", x)
        return ops("Sum", "loss", ops("Square", "square", ops(op_type, "twice", y, y)))

    edits = [Edit("twice", "before", shifted, 0), Edit("twice", "before", double, 1)]
    check(program, arrays((3, 4)), edits)


def test_a_product_with_itself_as_matrix() -> None:
    def program(ops: Ops, x: Any) -> Any:
        return ops("Sum", "loss", ops("Sin", "sin", ops("MatMul", "mm", x, x)))

    check(program, arrays((3, 3)), [Edit("mm", "before", shifted, 1)])


@pytest.mark.parametrize(
    "edit",
    [
        Edit("sum1", "before", shifted, 0),
        Edit("sum1", "before", shifted, 1),
        Edit("sum2", "before", shifted, 0),
        Edit("mm2", "before", shifted, 0),
        Edit("sum1", "after", shifted, 0),
        Edit("act1", "after", shifted, 0),
    ],
    ids=lambda edit: f"{edit.name}-{edit.kind}-{edit.position}",
)
def test_residual_sums(edit: Edit) -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        h1 = ops("AddV2", "sum1", x, ops("Tanh", "act1", ops("MatMul", "mm1", x, w)))
        h2 = ops("AddV2", "sum2", h1, ops("Tanh", "act2", ops("MatMul", "mm2", h1, w)))
        return ops("Sum", "loss", ops("Square", "square", h2))

    check(program, arrays((4, 3), (3, 3)), [edit], "resource")


# Chains and several edits.


def test_every_op_of_a_chain() -> None:
    def program(ops: Ops, x: Any) -> Any:
        for index in range(6):
            x = ops("Tanh", f"act{index}", x)
        return ops("Sum", "loss", x)

    check(program, arrays((3, 4)), [Edit("Tanh", "before", shifted, 0)])
    check(program, arrays((3, 4)), [Edit("Tanh", "after", shifted, 0)])


def test_edits_before_and_after_in_order() -> None:
    edits = [
        Edit("mm", "before", shifted, 1),
        Edit("mm", "before", lambda v: v + 1.0, 1),
        Edit("mm", "before", double, 0),
        Edit("mm", "after", double, 0),
        Edit("mm", "after", lambda v: v - 1.0, 0),
        Edit("square", "before", shifted, 0),
    ]
    check(dense, arrays((4, 3), (3, 2)), edits, "resource")


def test_tools_in_order() -> None:
    edits = [Edit("mm", "before", shifted, 1), Edit("mm", "before", double, 1)]
    check(dense, arrays((4, 3), (3, 2)), edits, tools=[editing(edits[0]), editing(edits[1])])


def test_a_staged_and_a_host_routine_at_one_point() -> None:
    edits = [
        Edit("mm", "before", shifted, 1),
        Edit("mm", "before", staged(double), 1),
        Edit("mm", "before", lambda v: v + 1.0, 1),
    ]
    check(dense, arrays((4, 3), (3, 2)), edits, "resource")


@pytest.mark.parametrize("kind", ["before", "after"])
def test_staged_routines_give_what_host_routines_give(kind: str) -> None:
    position = 1 if kind == "before" else 0
    values = arrays((4, 3), (3, 2))
    host = check(dense, values, [Edit("mm", kind, shifted, position)])
    native = check(dense, values, [Edit("mm", kind, staged(lambda v: v * 0.5 + 0.25), position)])
    equal(native, host)


def test_a_staged_routine_reads_its_mask() -> None:
    mask = np.array([[1, 0], [0, 1], [1, 1]], np.float32)

    @amanda.staged
    def masked(value: Any) -> Any:
        return value * mask

    check(dense, arrays((4, 3), (3, 2)), [Edit("mm", "before", masked, 1)], "resource")


# Differentiated edits and replacements.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "edit",
    [
        Edit("mm", "before", tf.square, 1, True),
        Edit("mm", "after", tf.sin, 0, True),
        Edit("act", "before", tf.square, 0, True),
    ],
    ids=lambda edit: f"{edit.name}-{edit.kind}",
)
def test_differentiated_edits(kind: str, edit: Edit) -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        return ops("Sum", "loss", ops("Tanh", "act", ops("MatMul", "mm", x, w)))

    check(program, arrays((4, 3), (3, 2)), [edit], kind)


def test_differentiated_edit_of_one_of_two_equal_inputs() -> None:
    def program(ops: Ops, x: Any) -> Any:
        y = ops("Exp", "exp", x)
        return ops("Sum", "loss", ops("Mul", "twice", y, y))

    check(program, arrays((3, 4)), [Edit("twice", "before", tf.sin, 1, True)])


def test_differentiated_and_straight_edits_together() -> None:
    edits = [
        Edit("mm", "before", tf.sin, 1, True),
        Edit("mm", "before", shifted, 1),
        Edit("mm", "after", tf.square, 0, True),
        Edit("mm", "after", double, 0),
    ]
    check(dense, arrays((4, 3), (3, 2)), edits)


@pytest.mark.parametrize(
    ("name", "routine"),
    [
        ("act", tf.nn.softplus),
        ("act", tf.identity),
        ("mm", lambda x, w: tf.matmul(x, w * w) + 1.0),
        ("mm", staged(lambda x, w: tf.matmul(tf.sin(x), w))),
    ],
)
def test_replacements(name: str, routine: Any) -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        return ops("Sum", "loss", ops("Tanh", "act", ops("MatMul", "mm", x, w)))

    check(program, arrays((4, 3), (3, 2)), [Edit(name, "replace", routine)], "resource")


def test_a_replacement_between_edits() -> None:
    edits = [
        Edit("act", "before", shifted, 0),
        Edit("act", "replace", tf.nn.softplus),
        Edit("act", "after", double, 0),
        Edit("act", "grad_out", lambda g: g * 3.0, 0),
        Edit("act", "grad_in", lambda g: g + 1.0, 0),
    ]

    def program(ops: Ops, x: Any, w: Any) -> Any:
        return ops("Sum", "loss", ops("Tanh", "act", ops("MatMul", "mm", x, w)))

    check(program, arrays((4, 3), (3, 2)), edits)


# Ops with lists, several outputs, attributes and other dtypes.


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
