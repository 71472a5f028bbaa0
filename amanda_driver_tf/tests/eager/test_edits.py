"""Edits pass straight through: values change, the graph does not. The oracle has the edits built
in.

The module is long because it is a list of cases.
"""

# mypy: allow-subclassing-any, allow-untyped-calls, allow-untyped-decorators
# TensorFlow and Keras have no types.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from amanda import OpContext, apply, autodiff_enabled
from amanda_core.errors import EditError, PositionError, RoutineResultError, UnsupportedError
from amanda_core.runtime.threads import original
from amanda_core.testing.kit.tools import (
    after,
    at_inputs,
    at_outputs,
    before,
    replacing,
    replacing_backward,
    tool,
)

from .tensors import close, equal, normal, noting, variable


def double(value: tf.Tensor) -> tf.Tensor:
    return value * 2.0


def gradient(
    function: Callable[..., Any], *sources: Any, persistent: bool = False
) -> tuple[Any, list[Any]]:
    with tf.GradientTape(persistent=persistent) as tape:
        for source in sources:
            if not isinstance(source, tf.Variable):
                tape.watch(source)
        value = function(*sources)
    return value, tape.gradient(value, list(sources))


# Inputs.


def test_edited_weight_acts_like_a_twin_with_that_weight() -> None:
    x, w, b = normal(4, 3), variable(3, 2), variable(2)

    def program(x: Any, w: Any, b: Any) -> Any:
        return tf.reduce_sum(tf.square(tf.nn.bias_add(tf.matmul(x, w), b)))

    expected = gradient(program, x, tf.Variable(w * 2.0), b)
    with apply(before("MatMul", double, [1])):
        results = [gradient(program, x, w, b) for _ in range(2)]
    equal(results, [expected] * 2)


def test_edited_activation_gets_the_gradient_of_the_value_it_stands_for() -> None:
    x = normal(3)
    with apply(before("Exp", double)):
        value, (grad,) = gradient(tf.exp, x)
    # The formula sees the edited value, the gradient goes on as if nothing had happened.
    equal(value, tf.exp(x * 2.0))
    equal(grad, tf.exp(x * 2.0))


def test_edited_output_leaves_the_formula_what_the_op_computed() -> None:
    x = normal(3)
    with apply(after("Exp", double)):
        value, (grad,) = gradient(lambda x: tf.square(tf.exp(x)), x)
    equal(value, tf.square(tf.exp(x) * 2.0))
    # d(square) at the edited value, d(exp) at the raw one.
    equal(grad, 2.0 * (tf.exp(x) * 2.0) * tf.exp(x))


def test_formula_of_an_edited_input_sees_the_edited_value_and_no_other_op_does() -> None:
    x = normal(3)

    def program(x: Any) -> Any:
        return tf.exp(x) * tf.tanh(x)

    with apply(before("Exp", double)):
        _, (grad,) = gradient(program, x)
    a, b = tf.exp(2.0 * x), tf.tanh(x)
    close(grad, a * b + a * (1.0 - b * b))


def test_prune_of_a_keras_model_equals_the_hand_masked_one() -> None:
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            keras.layers.Conv2D(3, 3),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    x = normal(2, 6, 6, 2)
    kernel = model.layers[0].kernel
    mask = tf.cast(tf.abs(kernel.value) > tf.reduce_mean(tf.abs(kernel.value)), tf.float32)

    def prune(context: OpContext) -> None:
        weight = context.value(1)
        assert weight is not None
        context["mask"] = tf.cast(tf.abs(weight) > tf.reduce_mean(tf.abs(weight)), tf.float32)
        context.insert_before_op(lambda w: w * context["mask"], inputs=[1])
        context.insert_after_backward_op(lambda g: g * context["mask"], grad_inputs=[1])

    def run() -> tuple[Any, list[Any]]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x)))
        return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])

    with apply(tool(prune, "Conv2D")):
        pruned = [run() for _ in range(3)]
    kernel.assign(kernel.value * mask)
    loss, grads = run()
    grads[0] = grads[0] * mask
    for result in pruned:
        equal(result, (loss, grads))


def test_attribute_arguments_are_no_positions() -> None:
    x = normal(2, 3)
    with apply(before("Sum", lambda value, axis: None)):
        equal(tf.reduce_sum(x, axis=0, keepdims=True), tf.reduce_sum(x, 0, True))
    with (
        pytest.raises(
            PositionError, match=r"no inputs\[2\]: it has 2 \(input, reduction_indices\)"
        ),
        apply(before("Sum", double, [2])),
    ):
        tf.reduce_sum(x, axis=0)


def test_list_of_another_length_is_an_error() -> None:
    x = normal(2)

    def shorter(values: Any) -> Any:
        return [values[:1]]

    with pytest.raises(EditError, match="list of 2"), apply(before("ConcatV2", shorter, [0])):
        tf.concat([x, x], 0)


def test_edited_list_passes_gradients_to_each() -> None:
    a, b = normal(2), normal(2, seed=1)

    def program(a: Any, b: Any) -> Any:
        return tf.square(tf.concat([a, b], 0))

    with apply(before("ConcatV2", lambda values: [values[0], values[1] * 3.0], [0])):
        value, grads = gradient(program, a, b)
    equal(value, tf.square(tf.concat([a, b * 3.0], 0)))
    equal(grads, [2.0 * a, 2.0 * (b * 3.0)])


def test_tools_fold_in_the_order_of_application() -> None:
    x = normal(2)
    with apply(before("Relu", lambda v: v + 1.0), before("Relu", double)):
        actual = tf.nn.relu(x)
    equal(actual, tf.nn.relu((x + 1.0) * 2.0))


def test_values_that_are_no_tensors_are_converted() -> None:
    x = normal(2)
    with apply(before("Relu", lambda v: np.ones(2))):
        equal(tf.nn.relu(x), tf.ones(2))
    with apply(before("Relu", lambda v: tf.Variable(v * 2.0))):
        actual = tf.nn.relu(x)
    equal(actual, tf.nn.relu(x * 2.0))
    with apply(before("Relu", lambda v: 3.0)):
        equal(tf.nn.relu(tf.constant(1.0)), tf.constant(3.0))


@pytest.mark.parametrize("bad", ["text", tf.constant([1, 2]), object()])
def test_value_that_cannot_be_one_is_an_error(bad: Any) -> None:
    with pytest.raises(EditError, match="routine"), apply(before("Relu", lambda v: bad)):
        tf.nn.relu(normal(2))


def test_edit_of_another_shape_is_an_error_where_a_gradient_flows() -> None:
    x = normal(4)
    expected = tf.nn.relu(x[:2])
    with apply(before("Relu", lambda v: v[:2])):
        equal(tf.nn.relu(x), expected)
        with pytest.raises(EditError, match=r"shape \(2,\)"):
            gradient(tf.nn.relu, x)
    with apply(after("Relu", lambda v: v[:2])), pytest.raises(EditError, match="shape"):
        gradient(tf.nn.relu, x)


def test_edited_value_that_the_tape_knows_does_not_leak_its_own_gradient() -> None:
    x, other = normal(3), variable(3, seed=1)

    def program(x: Any, other: Any) -> Any:
        return tf.exp(x)

    with apply(before("Exp", lambda v: other)):
        value, grads = gradient(program, x, other)
    equal(value, tf.exp(other))
    equal(grads, [tf.exp(other), None])


def test_edit_to_an_equal_value_keeps_sums_of_gradients_bit_for_bit() -> None:
    x, w = normal(5, 5), [normal(5, 5, seed=s) for s in range(1, 6)]

    def program(x: Any) -> Any:
        return tf.reduce_sum(tf.add_n([tf.tanh(tf.matmul(x, one)) * x for one in w]))

    plain = gradient(program, x)
    same = lambda *values: [tf.identity(value) for value in values]  # noqa: E731
    with apply(before("MatMul", same), before("Mul", same), after("Tanh", tf.identity)):
        for _ in range(2):
            equal(gradient(program, x), plain)


def test_routine_that_returns_nothing_changes_nothing() -> None:
    x = normal(3)
    plain = gradient(tf.exp, x)
    with apply(before("Exp", lambda v: None), after("Exp", lambda v: None)):
        for _ in range(2):
            equal(gradient(tf.exp, x), plain)


def test_wrong_number_of_values_is_an_error() -> None:
    with (
        pytest.raises(RoutineResultError, match="returned 3 values, but was given 2"),
        apply(before("MatMul", lambda a, b: (a, b, a))),
    ):
        tf.matmul(normal(2, 2), normal(2, 2))


def test_one_of_several_outputs_is_edited() -> None:
    x = normal(2, 4)
    with apply(after("TopKV2", lambda values: values + 1.0, [0])):
        value, (grad,) = gradient(lambda x: tf.math.top_k(x, 2).values, x)
    plain, (expected,) = gradient(lambda x: tf.math.top_k(x, 2).values, x)
    equal(value, plain + 1.0)
    equal(grad, expected)


def test_stateful_ops_take_edits() -> None:
    v = variable(3)
    start = v.numpy()
    with apply(before("AssignAddVariableOp", double, [1])):
        v.assign_add(tf.ones(3))
    equal(v.value(), start + 2.0)


# Autodiff.


def test_autodiff_differentiates_the_routine_before() -> None:
    x = normal(3)

    def insert(context: OpContext) -> None:
        with autodiff_enabled():
            context.insert_before_op(double)

    with apply(tool(insert, "Exp")):
        results = [gradient(tf.exp, x) for _ in range(2)]
    equal(results, [(tf.exp(x * 2.0), [tf.exp(x * 2.0) * 2.0])] * 2)


def test_autodiff_differentiates_the_routine_after_with_what_it_uses() -> None:
    x, scale = normal(3), variable(3, seed=2)

    def insert(context: OpContext) -> None:
        with autodiff_enabled():
            context.insert_after_op(lambda y: y * scale)

    with apply(tool(insert, "Exp")):
        value, grads = gradient(lambda x, scale: tf.exp(x), x, scale)
    equal(value, tf.exp(x) * scale)
    equal(grads, [scale * tf.exp(x), tf.exp(x)])


def test_autodiff_after_a_straight_through_edit() -> None:
    x = normal(3)

    def insert(context: OpContext) -> None:
        context.insert_before_op(lambda v: v + 1.0)
        with autodiff_enabled():
            context.insert_before_op(double)

    with apply(tool(insert, "Exp")):
        value, (grad,) = gradient(tf.exp, x)
    equal(value, tf.exp((x + 1.0) * 2.0))
    equal(grad, tf.exp((x + 1.0) * 2.0) * 2.0)


def test_routine_off_the_tape_takes_no_part_even_if_it_reads_variables() -> None:
    x, scale = normal(3), variable(3, seed=2)
    with apply(after("Exp", lambda y: y * scale)):
        _, grads = gradient(lambda x, scale: tf.exp(x), x, scale)
    equal(grads, [tf.exp(x), None])


# Replacement.


def test_replacement_is_differentiated_as_written() -> None:
    x = normal(3)
    with apply(replacing("Relu", lambda v: v * v)):
        for _ in range(2):
            value, (grad,) = gradient(tf.nn.relu, x)
            equal(value, x * x)
            equal(grad, x + x)


def test_replacement_by_the_identity_removes_an_op() -> None:
    x = normal(3)
    with apply(replacing("Relu", lambda v: v)):
        value, (grad,) = gradient(lambda x: tf.nn.relu(x) * 2.0, x)
    equal(value, x * 2.0)
    equal(grad, tf.fill([3], 2.0))


def test_original_of_a_replaced_op_does_not_run() -> None:
    v = variable(2)
    start = v.numpy()
    with apply(replacing("TopKV2", lambda x, k: (x[..., :1], tf.zeros([1], tf.int32)))):
        values, indices = tf.math.top_k(normal(3), 2)
    equal(values, normal(3)[:1])
    equal(indices, tf.zeros([1], tf.int32))
    equal(v.value(), start)


def test_insertions_see_a_replacement_as_the_op() -> None:
    x = normal(3)
    with apply(
        before("Relu", double), replacing("Relu", lambda v: v + 1.0), after("Relu", tf.negative)
    ):
        value, (grad,) = gradient(tf.nn.relu, x)
    equal(value, -(x * 2.0 + 1.0))
    equal(grad, tf.ones(3))


def test_aligned_gradients_of_a_replacement() -> None:
    x = normal(3)
    got: list[Any] = []
    with apply(
        replacing("Relu", lambda v: v * v),
        at_outputs("Relu", noting(got, lambda g: g * 2.0)),
        at_inputs("Relu", noting(got, lambda g: g + 1.0)),
    ):
        _, (grad,) = gradient(lambda x: tf.nn.relu(x) * 3.0, x)
    equal(got[0], tf.fill([3], 3.0))
    equal(got[1], 6.0 * x + 6.0 * x)
    equal(grad, (6.0 * x + 6.0 * x) + 1.0)


def test_replaced_backward_of_a_replaced_op() -> None:
    x = normal(3)
    with apply(replacing("Relu", lambda v: v * v), replacing_backward("Relu", lambda g: g * 5.0)):
        value, (grad,) = gradient(tf.nn.relu, x)
    equal(value, x * x)
    equal(grad, tf.fill([3], 5.0))


@pytest.mark.parametrize("bad", [None, ()])
def test_replacement_with_a_wrong_result_is_an_error(bad: Any) -> None:
    with pytest.raises(RoutineResultError), apply(replacing("Relu", lambda v: bad)):
        tf.nn.relu(normal(2))


def test_two_replacements_are_an_error() -> None:
    from amanda_core.errors import ReplacementConflictError

    with (
        pytest.raises(ReplacementConflictError),
        apply(replacing("Relu", double), replacing("Relu", double)),
    ):
        tf.nn.relu(normal(2))


# Identity instrumentation.


@pytest.mark.parametrize("edit", ["nothing", "same", "equal"])
def test_identity_instrumentation_changes_no_bit_of_a_model(edit: str) -> None:
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            keras.layers.Conv2D(4, 3, padding="same"),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    x = normal(2, 8, 8, 2)

    def run() -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x)))
        return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])

    def routine(*values: Any) -> Any:
        if edit == "nothing":
            return None
        if edit == "same":
            return values
        return [
            [tf.identity(v) for v in value] if isinstance(value, list) else tf.identity(value)
            for value in values
        ]

    def insert(context: OpContext) -> None:
        handles = [i for i in context.inputs if not isinstance(i, list) and i.dtype == tf.resource]
        if not handles:
            context.insert_before_op(routine)
        context.insert_after_op(routine)
        context.insert_before_backward_op(routine if edit != "equal" else lambda *g: None)
        context.insert_after_backward_op(routine if edit != "equal" else lambda *g: None)

    plain = run()
    with apply(tool(insert)):
        for _ in range(2):
            equal(run(), plain)
    equal(run(), plain)


@pytest.mark.parametrize("op", ["Conv2D", "Relu", "ConcatV2", "Reshape", "Softmax"])
def test_a_replacement_may_run_the_op_itself(op: str) -> None:
    kernel, x = variable(3, 3, 2, 4), normal(2, 5, 5, 2)

    def itself(*values: Any) -> Any:
        run = original()
        assert run is not None
        return run(values)

    def program() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))
            y = tf.nn.softmax(tf.reshape(tf.concat([y, y], 3), (2, -1)))
            total = tf.reduce_sum(y * y)
        return total, *tape.gradient(total, [x, kernel])

    expected = program()
    with apply(replacing(op, itself)):
        found = program()
    for value, other in zip(found, expected, strict=True):
        equal(value, other)
    assert original() is None


def test_an_op_that_returns_nothing_is_replaced() -> None:
    held = tf.Variable([1.0, 2.0])

    def program() -> Any:
        held.assign_add([1.0, 1.0])
        return held + 0.0

    with apply(replacing("AssignAddVariableOp", lambda *values: None)):
        equal(program(), tf.constant([1.0, 2.0]))
        with pytest.raises(UnsupportedError, match="returns nothing"):
            tf.function(program)()
    equal(program(), tf.constant([2.0, 3.0]))
