"""Gradients of an op as a whole (aligned), and its backward ops one by one (raw).

The module is long because it is a list of cases.
"""

# mypy: allow-subclassing-any, allow-untyped-calls, allow-untyped-decorators
# TensorFlow and Keras have no types.

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from amanda import OpContext, apply
from amanda_core.errors import EditError, PositionError, RoutineResultError
from amanda_core.testing.kit.tools import (
    around,
    at_inputs,
    at_outputs,
    before,
    idle,
    replacing_backward,
    tool,
    watching_backward,
)

from .tensors import close, equal, normal, variable
from .test_edits import gradient


def keep(into: list[Any]) -> Any:
    def routine(*grads: Any) -> None:
        into.append(grads[0] if len(grads) == 1 else grads)

    return routine


late = pytest.mark.parametrize("late", [False, True])

# Aligned.


@late
def test_gradient_at_an_output_is_the_whole_one_arriving(late: bool) -> None:
    x = normal(3)
    got: list[Any] = []
    with apply(at_outputs("Exp", keep(got), late=late)):
        for _ in range(2):
            got.clear()

            def program(x: Any) -> Any:
                y = tf.exp(x)
                return y * 2.0 + y * 3.0

            gradient(program, x)
            equal(got, [tf.fill([3], 5.0)])


@late
def test_gradients_at_the_inputs_are_contributions_by_position(late: bool) -> None:
    x, w = normal(4, 3), variable(3, 2)
    got: list[Any] = []
    with apply(at_inputs("MatMul", keep(got), late=late)):
        for _ in range(2):
            got.clear()
            gradient(lambda x, w: tf.matmul(x, w), x, w)
            ones = tf.ones((4, 2))
            close(got[0][0], tf.matmul(ones, w, transpose_b=True))
            close(got[0][1], tf.matmul(x, ones, transpose_a=True))


@late
def test_contribution_is_that_of_this_op_alone(late: bool) -> None:
    x = normal(3)
    got: list[Any] = []
    with apply(at_inputs("Exp", keep(got), late=late)):
        _, (grad,) = gradient(lambda x: tf.exp(x) + tf.square(x), x)
    equal(got, [tf.exp(x)])
    close(grad, tf.exp(x) + 2.0 * x)


def test_same_tensor_at_two_positions_has_two_contributions() -> None:
    x = normal(3)
    got: list[Any] = []
    with apply(at_inputs("Mul", keep(got))):
        gradient(lambda x: x * x, x)
    equal(got, [(x, x)])


def test_list_of_inputs_is_one_position() -> None:
    a, b = normal(2), normal(2, seed=1)
    got: list[Any] = []

    def routine(values: Any) -> Any:
        got.append(values)
        return [values[0] * 2.0, values[1]]

    with apply(at_inputs("ConcatV2", routine, [0])):
        _, grads = gradient(lambda a, b: tf.concat([a, b], 0) * 3.0, a, b)
    equal(got, [[tf.fill([2], 3.0)] * 2])
    equal(grads, [tf.fill([2], 6.0), tf.fill([2], 3.0)])


def test_input_without_gradient_does_not_call_the_routine() -> None:
    x = normal(2, 3)
    got: list[Any] = []
    with apply(at_inputs("Sum", lambda g: got.append(g), [1]), at_inputs("Sum", keep(got), [0])):
        gradient(lambda x: tf.reduce_sum(x, axis=0), x)
    equal(got, [tf.ones((2, 3))])


def test_routine_that_wants_several_gets_none_for_an_input_without() -> None:
    x = normal(2, 3)
    got: list[Any] = []
    with apply(at_inputs("Sum", keep(got))):
        gradient(lambda x: tf.reduce_sum(x, axis=0), x)
    assert got[0][1] is None


@late
def test_edited_gradients_flow_on(late: bool) -> None:
    x = normal(3)
    with apply(
        at_outputs("Exp", lambda g: g * 2.0, late=late),
        at_inputs("Exp", lambda g: g + 1.0, late=late),
    ):
        for _ in range(2):
            _, (grad,) = gradient(tf.exp, x)
            equal(grad, tf.exp(x) * 2.0 + 1.0)


def test_gradient_edits_of_several_tools_fold_in_order() -> None:
    x = normal(3)
    with apply(at_inputs("Exp", lambda g: g + 1.0), at_inputs("Exp", lambda g: g * 2.0)):
        _, (grad,) = gradient(tf.exp, x)
    equal(grad, (tf.exp(x) + 1.0) * 2.0)


@pytest.mark.parametrize("make", [at_inputs, at_outputs])
@pytest.mark.parametrize("bad", ["text", tf.constant([1, 2, 3]), tf.ones(4)])
def test_gradient_of_a_wrong_kind_is_an_error_of_the_tool(make: Any, bad: Any) -> None:
    with apply(make("Exp", lambda g: bad)), pytest.raises(EditError, match="routine"):
        gradient(tf.exp, normal(3))


def test_position_that_the_op_does_not_have_is_an_error() -> None:
    with apply(at_outputs("Exp", lambda g: g, [1])), pytest.raises(PositionError):
        tf.exp(normal(3))


@pytest.mark.parametrize("form", [lambda g: g, lambda g: [g], lambda g: (g, None)])
def test_whole_backward_is_replaced(form: Any) -> None:
    x = normal(3)
    ran, watch = watching_backward()
    with apply(replacing_backward("Exp", lambda g: form(g * 7.0)), watch):
        for _ in range(2):
            value, (grad,) = gradient(tf.exp, x)
            equal(value, tf.exp(x))
            equal(grad, tf.fill([3], 7.0))
    assert "Exp" not in {forward for _, forward in ran}


def test_backward_of_several_inputs_is_replaced_by_position() -> None:
    x, w = normal(4, 3), variable(3, 2)
    with apply(replacing_backward("MatMul", lambda g: (x * 2.0, tf.ones((3, 2))))):
        _, grads = gradient(lambda x, w: tf.matmul(x, w), x, w)
    equal(grads, [x * 2.0, tf.ones((3, 2))])


def test_single_gradient_stands_for_the_only_differentiable_input() -> None:
    x, w = normal(4, 3), variable(3, 2)
    with apply(replacing_backward("MatMul", lambda g: tf.ones((3, 2)))):
        _, (grad,) = gradient(lambda w: tf.matmul(x, w), w)
    equal(grad, tf.ones((3, 2)))


@pytest.mark.parametrize("result", [(), tf.ones(5)])
def test_replaced_backward_with_a_wrong_result_is_an_error(result: Any) -> None:
    with (
        apply(replacing_backward("Exp", lambda g: result)),
        pytest.raises((RoutineResultError, EditError)),
    ):
        gradient(tf.exp, normal(3))


def test_sparse_gradients_stay_sparse_and_are_edited() -> None:
    table, ids = variable(5, 2), tf.constant([1, 3, 1])
    got: list[Any] = []

    def program(table: Any) -> Any:
        return tf.reduce_sum(tf.gather(table, ids) ** 2.0)

    _, (plain,) = gradient(program, table)
    assert isinstance(plain, tf.IndexedSlices)
    with apply(at_inputs("ResourceGather", keep(got), [0]), idle()):
        for _ in range(2):
            _, (grad,) = gradient(program, table)
            assert isinstance(grad, tf.IndexedSlices)
            equal(grad.values, plain.values)
    assert all(isinstance(slices, tf.IndexedSlices) for slices in got)

    def scale(g: Any) -> Any:
        return tf.IndexedSlices(g.values * 2.0, g.indices, g.dense_shape)

    with apply(at_inputs("ResourceGather", scale, [0])):
        _, (grad,) = gradient(program, table)
    assert isinstance(grad, tf.IndexedSlices)
    equal(grad.values, plain.values * 2.0)
    with apply(at_inputs("ResourceGather", lambda g: tf.convert_to_tensor(g) * 2.0, [0])):
        _, (grad,) = gradient(program, table)
    close(grad, tf.convert_to_tensor(plain) * 2.0)


def test_what_was_asked_for_an_execution_holds_for_its_backward() -> None:
    x = normal(3)
    calls: list[int] = []
    rounds = iter(range(10))

    def analyse(context: OpContext) -> None:
        number = next(rounds)
        context.insert_after_backward_op(lambda g: calls.append(number))

    made = tool(analyse, "Exp")
    with apply(made), tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.exp(x)
        made.invalidate()
        z = tf.exp(y)
        tape.gradient(z, x)
    assert sorted(calls) == [0, 1]


# Raw.


def test_backward_ops_share_the_op_id_and_have_ids_of_their_own() -> None:
    x, w = normal(4, 3), variable(3, 2)
    forward: list[int] = []
    backward: list[tuple[int, int, str]] = []

    def note_backward(context: OpContext) -> None:
        number = context.get_backward_op_id()
        assert number is not None
        backward.append((context.get_op_id(), number, context.get_backward_op().type))

    made = tool(lambda context: forward.append(context.get_op_id()), "MatMul")
    made.add_inst_for_op(lambda c: note_backward(c) if c.op_type == "MatMul" else None, True, False)
    with apply(made):
        for _ in range(3):
            gradient(lambda x, w: tf.matmul(x, w), x, w)
    assert len(forward) == 1
    assert [one[0] for one in backward] == forward * 2
    assert len({one[1] for one in backward}) == 2
    assert {one[2] for one in backward} == {"MatMul"}


def test_raw_gradients_are_the_ops_inputs_and_outputs() -> None:
    x = normal(3)
    got: dict[str, Any] = {}

    def analyse(context: OpContext) -> None:
        context.insert_before_backward_op(lambda *v: got.update(before=v))
        context.insert_after_backward_op(lambda *v: got.update(after=v))

    with apply(tool(analyse, "ReluGrad", backward=True)):
        gradient(tf.nn.relu, x)
    equal(got["before"], (tf.ones(3), tf.nn.relu(x)))
    equal(got["after"], (tf.cast(x > 0.0, tf.float32),))


def test_raw_gradients_are_edited_before_and_after() -> None:
    x = normal(3)

    def analyse(context: OpContext) -> None:
        context.insert_before_backward_op(lambda g: g * 2.0, grad_outputs=[0])
        context.insert_after_backward_op(lambda g: g + 1.0)

    with apply(tool(analyse, "ReluGrad", backward=True)):
        for _ in range(2):
            _, (grad,) = gradient(tf.nn.relu, x)
            equal(grad, tf.cast(x > 0.0, tf.float32) * 2.0 + 1.0)


def test_one_backward_op_is_replaced() -> None:
    x, w = normal(4, 3), variable(3, 2)
    _, (plain, _) = gradient(lambda x, w: tf.matmul(x, w), x, w)
    first: list[int] = []

    def analyse(context: OpContext) -> None:
        number = context.get_backward_op_id()
        assert number is not None
        first.append(number)
        if number == first[0]:
            context.replace_backward_op(lambda a, b: tf.zeros((4, 3)))

    with apply(tool(analyse, "MatMul", backward=True)):
        for _ in range(2):
            _, grads = gradient(lambda x, w: tf.matmul(x, w), x, w)
            equal(grads[0], tf.zeros((4, 3)))
            close(grads[1], tf.matmul(x, tf.ones((4, 2)), transpose_a=True))
    assert not np.allclose(plain, 0.0)


def test_raw_replacement_with_a_wrong_count_is_an_error() -> None:
    made = tool(lambda c: c.replace_backward_op(lambda *v: (v[0], v[0])), "ReluGrad", backward=True)
    with apply(made), pytest.raises(RoutineResultError, match="2 values, but ReluGrad has 1"):
        gradient(tf.nn.relu, normal(3))


def test_sums_of_gradients_are_backward_ops_without_forward_op() -> None:
    x = normal(3)
    found: list[tuple[int, int, Any]] = []

    def analyse(context: OpContext) -> None:
        number = context.get_backward_op_id()
        assert number is not None
        assert context.forward is None
        assert context.get_op() is not None
        context.insert_before_backward_op(
            lambda grads: found.append((number, len(grads), grads[0].shape))
        )

    def program(x: Any, skip: bool = False) -> Any:
        y = tf.exp(x)
        a = y * 2.0 + y * 3.0
        return a if skip else a + tf.sin(x) + tf.cos(x)

    with apply(tool(analyse, "AddN", backward=True)):
        for _ in range(2):
            gradient(program, x)
        ids = {number for number, _, _ in found}
        assert len(ids) == 2
        assert Counter(count for _, count, _ in found) == {2: 2, 3: 2}
        inner = {number for number, count, _ in found if count == 2}
        found.clear()
        # A sum for y is identified by the ops whose gradients it adds, not by its position.
        gradient(lambda x: program(x, True), x)
        assert {number for number, _, _ in found} == inner


def test_quiet_backward_of_an_op_that_needs_nothing_is_still_right() -> None:
    x, w = normal(4, 3), variable(3, 2)

    def program(x: Any, w: Any) -> Any:
        return tf.reduce_sum(tf.tanh(tf.matmul(x, w)))

    plain = gradient(program, x, w)
    with apply(idle()):
        for _ in range(4):
            equal(gradient(program, x, w), plain)


def test_new_inputs_asked_for_are_seen_after_the_op_was_quiet() -> None:
    x, w = normal(4, 3), variable(3, 2)
    analysed: list[str] = []
    made = tool(lambda c: analysed.append(c.name), "MatMul", backward=True)
    with apply(made):
        for both in (False, False, True):
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([x, w] if both else x)
                y = tf.matmul(x, w)
            tape.gradient(y, x)
    # TensorFlow has functions of their own for one of the two and for both.
    assert analysed == ["MatMul:MatMul", "MatMul:MatMul#2", "MatMul:MatMul#3"]


def test_edited_forward_value_is_what_backward_ops_get() -> None:
    x, w = normal(4, 3), variable(3, 2)
    got: list[Any] = []
    made = tool(
        lambda c: c.insert_before_backward_op(lambda a, b: got.append((a, b))),
        "MatMul",
        backward=True,
    )
    with apply(before("MatMul", lambda value: value * 2.0, [1]), made):
        gradient(lambda x, w: tf.matmul(x, w), x, w)
    close(got[0][1], w * 2.0)


def test_op_off_the_way_to_the_loss_is_still_looked_into_when_it_is_on_it() -> None:
    x = normal(3)
    analysed: list[str] = []

    def program(aside: bool) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y, z = tf.exp(x), tf.tanh(x)
        return tape.gradient(z if aside else y, x)

    expected = tf.exp(x) * 2.0
    for insert in (False, True):
        analysed.clear()

        def analyse(context: OpContext, insert: bool = insert) -> None:
            if context.forward is not None and context.forward.op_type == "Exp":
                analysed.append(context.op_type)
                if insert:
                    context.insert_after_backward_op(lambda g: g * 2.0)

        with apply(tool(analyse, "Mul", backward=True)):
            for _ in range(6):
                program(aside=True)
            assert analysed == []
            grads = [program(aside=False) for _ in range(6)]
        assert analysed == ["Mul"]
        if insert:
            equal(grads, [expected] * 6)


def test_raw_routine_is_refused_in_a_graph_also_of_an_op_that_was_quiet_before() -> None:
    from amanda_core.errors import UnsupportedError

    x = normal(3)

    def program(pfor: bool) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.exp(x)
        return tape.jacobian(y, x, experimental_use_pfor=pfor)

    made = tool(lambda c: c.insert_after_backward_op(lambda g: g * 2.0), "Mul", backward=True)
    with apply(made):
        for _ in range(4):
            program(False)
        with pytest.raises(UnsupportedError, match="jacobian"):
            program(True)


@pytest.mark.parametrize("made", [idle, lambda: around()[1]], ids=["idle", "around"])
def test_custom_gradients_around_ops_with_no_output_and_with_a_list(made: Any) -> None:
    """TensorFlow's own code calls these ops and ends the function with a custom gradient."""
    x, z = tf.Variable(1.0), tf.Variable(3.0)
    with apply(made()):
        for _ in range(4):  # Analysed, waiting, and with nothing to do.
            with tf.GradientTape() as tape:
                y = tf.grad_pass_through(x.assign)(z**2)
            equal(tape.gradient(y, z), 6.0)
            equal(x, 9.0)
            with tf.GradientTape():
                (first,) = tf.grad_pass_through(tf.unstack)(tf.reshape(z, [1]))
            equal(first, 3.0)
