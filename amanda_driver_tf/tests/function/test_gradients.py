"""Routines at gradients, aligned and raw, and replacements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda import OpContext
from amanda_core.testing.kit.tools import Edit, around, at_inputs, at_outputs, before, editing, tool

from ..comparison import close
from .handwritten_programs import W, X, compare, half, triple
from .reference_programs import at_gradient, outside, straight

# The aligned view.


def test_gradients_pass_through_sums_and_identities_to_the_right_one() -> None:
    def program(x: Any, w: Any) -> Any:
        h = tf.matmul(x, w)
        return tf.reduce_sum(tf.sin(tf.raw_ops.AddV2(x=h, y=tf.identity(x), name="a1") + h))

    def reference(position: int) -> Callable[..., Any]:
        def run(x: Any, w: Any) -> Any:
            h = tf.matmul(x, w)
            given = [h, tf.identity(x)]
            given[position] = at_gradient(given[position], triple)
            return tf.reduce_sum(tf.sin(given[0] + given[1] + h))

        return run

    for position in (0, 1):
        compare(at_inputs("a1", triple, position), program, reference(position))


def test_the_same_tensor_twice() -> None:
    def program(make: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
        return lambda x: tf.reduce_sum(tf.sin(make(x, x)))

    for op_type in ("Mul", "AddV2", "Sub", "Maximum", "SquaredDifference"):
        op = getattr(tf.raw_ops, op_type)

        def plain_op(a: Any, b: Any, op: Any = op) -> Any:
            return op(x=a, y=b)

        plain = program(plain_op)
        for position in (0, 1):

            def edited(a: Any, b: Any, op: Any = op, position: int = position) -> Any:
                pair = [a, b]
                pair[position] = at_gradient(pair[position], triple)
                return op(x=pair[0], y=pair[1])

            compare(at_inputs(op_type, triple, position), plain, program(edited), X)


@pytest.mark.parametrize("position", [0, 1])
def test_one_of_two_equal_inputs_edited(position: int) -> None:
    def reference(x: Any) -> Any:
        pair = [x, x]
        pair[position] = straight(x, half)
        return tf.reduce_sum(tf.sin(pair[0] * pair[1]))

    compare(
        before("Mul", half, position),
        lambda x: tf.reduce_sum(tf.sin(tf.raw_ops.Mul(x=x, y=x))),
        reference,
        X,
    )


def test_broadcast_inputs_get_the_gradient_that_is_summed_for_them() -> None:
    shapes: list[Any] = []

    def see(gradient: Any) -> Any:
        shapes.append(tuple(gradient.shape))
        return gradient * 3

    compare(
        at_inputs("AddV2", see, 1),
        lambda x, w: tf.reduce_sum(tf.sin(x + w[0])),
        lambda x, w: tf.reduce_sum(tf.sin(x + at_gradient(w[0], triple))),
    )
    assert set(shapes) == {(3,)}


def test_the_gradient_arriving_is_the_sum_over_all_users() -> None:
    got: list[Any] = []
    with amanda.apply(at_outputs("Exp", lambda g: got.append(g.numpy()))):
        outside(tf.function(lambda x: (lambda h: tf.reduce_sum(h * h + 2 * h))(tf.exp(x))), X)
    close(got, [2 * tf.exp(X) + 2])


def test_what_an_op_contributes_is_told_before_others_are_added() -> None:
    got: list[Any] = []
    with amanda.apply(at_inputs("Exp", lambda g: got.append(g.numpy()))):
        close(
            outside(tf.function(lambda x: tf.reduce_sum(tf.exp(x) + tf.sin(x))), X)[1],
            (tf.exp(X) + tf.cos(X)).numpy(),
        )
    close(got, [tf.exp(X)])


def test_an_input_without_a_gradient_is_not_asked_about() -> None:
    got: list[Any] = []
    with amanda.apply(
        at_inputs("GatherV2", lambda g: got.append(g), 1), at_outputs("ArgMax", got.append)
    ):
        outside(tf.function(lambda x: tf.reduce_sum(tf.gather(x, tf.argmax(x, 1)[0], axis=1))), X)
    assert got == []


def test_gradients_fold_in_the_order_of_tools() -> None:
    tools = [at_outputs("Neg", lambda g: g + 1), at_outputs("Neg", lambda g: g * 10)]
    with amanda.apply(*tools):
        close(
            outside(tf.function(lambda x: tf.reduce_sum(-x)), X)[1],
            tf.fill(X.shape, -20.0 + X[0, 0] * 0),
        )


def test_replaced_backward() -> None:
    compare(
        editing(Edit("Relu", "backward", lambda g: g * 0.5)),
        lambda x, w: tf.reduce_sum(tf.nn.relu(tf.matmul(x, w)) ** 2),
        lambda x, w: tf.reduce_sum(
            tf.custom_gradient(lambda h: (tf.nn.relu(h), lambda g: g * 0.5))(tf.matmul(x, w)) ** 2
        ),
    )


def test_replaced_backward_of_two_inputs() -> None:
    compare(
        editing(Edit("MatMul", "backward", lambda g: (tf.ones_like(X), tf.ones_like(W)))),
        lambda x, w: tf.reduce_sum(tf.sin(tf.matmul(x, w))),
        lambda x, w: tf.reduce_sum(
            tf.sin(
                tf.custom_gradient(
                    lambda a, b: (tf.matmul(a, b), lambda g: (tf.ones_like(a), tf.ones_like(b)))
                )(x, w)
            )
        ),
    )


@pytest.mark.parametrize("staged", [False, True])
def test_replaced_op_is_differentiated_as_written(staged: bool) -> None:
    def gelu(x: Any) -> Any:
        return x * tf.sigmoid(1.7 * x)

    compare(
        editing(Edit("Relu", "replace", amanda.staged(gelu) if staged else gelu)),
        lambda x, w: tf.reduce_sum(tf.nn.relu(tf.matmul(x, w)) ** 2),
        lambda x, w: tf.reduce_sum(gelu(tf.matmul(x, w)) ** 2),
    )


def test_replacement_that_takes_one_of_the_inputs() -> None:
    compare(
        editing(Edit("MatMul", "replace", lambda x: x * 2, 0)),
        lambda x, w: tf.reduce_sum(tf.matmul(x, w) ** 2) + tf.reduce_sum(w),
        lambda x, w: tf.reduce_sum((x * 2) ** 2) + tf.reduce_sum(w),
    )


# The raw view.


def raw(op_type: str, method: str, routine: Callable[..., Any]) -> amanda.Tool:
    return tool(lambda c: getattr(c, method)(routine), op_type, backward=True)


def tanh_twin(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def edited(h: Any) -> Any:
        y = tf.tanh(h)
        return y, lambda g: change(y, g)

    return lambda x, w: tf.reduce_sum(edited(tf.matmul(x, w)) ** 2)


@pytest.mark.parametrize(
    ("method", "routine", "change"),
    [
        ("insert_before_backward_op", lambda y, g: (y * 0.5, g), lambda y, g: g * (1 - y * y / 4)),
        ("insert_after_backward_op", lambda g: g * 3, lambda y, g: 3 * g * (1 - y * y)),
        ("replace_backward_op", lambda y, g: y + g, lambda y, g: y + g),
    ],
)
def test_edits_of_a_backward_op(method: str, routine: Any, change: Any) -> None:
    compare(
        raw("TanhGrad", method, routine),
        lambda x, w: tf.reduce_sum(tf.tanh(tf.matmul(x, w)) ** 2),
        tanh_twin(change),
    )


def test_contexts_of_backward_ops() -> None:
    found: list[tuple[Any, ...]] = []

    def analyse(context: OpContext) -> None:
        forward = context.forward
        if forward is not None:
            assert context.is_backward()
            assert context.get_op() is forward.get_op()
            assert context.get_op().type == forward.op_type
            assert context.get_backward_op().type == context.op_type
            found.append((forward.op_type, context.op_type, context.get_backward_op_id()))

    with amanda.apply(tool(analyse, backward=True)):
        outside(tf.function(lambda x, w: tf.reduce_sum(tf.nn.relu(tf.matmul(x, w)))), X, W)
    pairs = [(forward, backward) for forward, backward, _ in found]
    assert pairs.count(("MatMul", "MatMul")) == 2
    assert ("Relu", "ReluGrad") in pairs
    assert len({number for *_, number in found}) == len(found)


def test_sums_of_gradients_are_backward_ops_without_a_forward_op() -> None:
    found: list[Any] = []

    def analyse(context: OpContext) -> None:
        found.append(context.forward)
        context.insert_after_backward_op(triple)

    with amanda.apply(tool(analyse, "AddN", backward=True)):
        close(
            outside(tf.function(lambda x: tf.reduce_sum(tf.exp(x) + tf.sin(x))), X)[1],
            (3 * (tf.exp(X) + tf.cos(X))).numpy(),
        )
    assert found == [None]


# What runs although only gradients read it.


@pytest.mark.parametrize("nested", [False, True])
def test_routines_after_an_op_run_where_only_its_own_gradient_needs_its_value(nested: bool) -> None:
    def loss(x: Any, w: Any) -> Any:
        return tf.reduce_sum(tf.nn.relu(tf.matmul(x, w)))

    inner = tf.function(loss) if nested else loss

    def gradient(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(w)
            result = inner(x, w)
        return tape.gradient(result, w)

    function = tf.function(gradient)
    plain = function(X, W)
    counts, counting = around()
    with amanda.apply(counting):
        for _ in range(3):
            close(function(X, W), plain)
    # The gradient of the sum needs its shape alone, so that TensorFlow does not run it.
    assert counts["Relu", "before"] == counts["Relu", "after"] == 3
    assert counts["Sum", "before"] == counts["Sum", "after"]
    assert nested or counts["Sum", "after"] == 0
