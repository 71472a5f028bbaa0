"""The ways of TensorFlow to differentiate: persistent and nested tapes, jacobians, forward mode,
functions with gradients of their own, recomputation; and a gradient that is computed too late.
The module is long because it is a list of cases.
"""

# mypy: allow-subclassing-any, allow-untyped-calls, allow-untyped-decorators
# TensorFlow and Keras have no types.

from __future__ import annotations

import threading
import warnings
from collections import Counter
from typing import Any

import pytest
import tensorflow as tf

from amanda import OpContext, apply, attach, autodiff_enabled, disabled, staged
from amanda_core.errors import AmandaWarning, UnsupportedError
from amanda_core.testing.kit.tools import (
    after,
    at_inputs,
    at_outputs,
    before,
    idle,
    replacing_backward,
    tool,
    watching,
    watching_backward,
)

from .tensors import close, equal, normal, noting, variable
from .test_edits import gradient


def double(value: Any) -> Any:
    return value * 2.0


# Tapes.


def test_persistent_tape_runs_routines_each_time() -> None:
    x = normal(3)
    got: list[Any] = []
    with apply(at_inputs("Exp", noting(got, double))):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.exp(x)
            z = tf.square(y)
        first, second = tape.gradient(y, x), tape.gradient(z, x)
    equal(first, tf.exp(x) * 2.0)
    close(second, 2.0 * tf.exp(x) * tf.exp(x) * 2.0)
    assert len(got) == 2


def test_two_tapes_record_one_op() -> None:
    x = normal(3)
    with apply(before("Exp", double)):
        with tf.GradientTape() as one, tf.GradientTape() as two:
            one.watch(x)
            two.watch(x)
            y = tf.exp(x)
        a, b = one.gradient(y, x), two.gradient(y, x)
    equal([a, b], [tf.exp(x * 2.0)] * 2)


def test_stopped_recording_stays_stopped() -> None:
    x = normal(3)
    with apply(before("Exp", double), after("Exp", double)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            with tape.stop_recording():
                y = tf.exp(x)
            z = y * x
        grad = tape.gradient(z, x)
        stopped = tf.stop_gradient(tf.exp(x))
    equal(grad, tf.exp(x * 2.0) * 2.0)
    equal(stopped, tf.exp(x * 2.0) * 2.0)


def test_unconnected_gradients() -> None:
    x, other = normal(3), normal(2)
    with apply(at_inputs("Exp", double)):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, other])
            y = tf.exp(x)
        assert tape.gradient(y, other) is None
        equal(tape.gradient(y, other, unconnected_gradients="zero"), tf.zeros(2))


def test_output_gradients_are_what_arrives() -> None:
    x, given = normal(3), normal(3, seed=5)
    got: list[Any] = []
    with apply(at_outputs("Exp", lambda g: got.append(g))):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.exp(x)
        grad = tape.gradient(y, x, output_gradients=given)
    equal(got, [given])
    equal(grad, given * tf.exp(x))


# Gradients of gradients.


def second(function: Any, x: Any) -> tuple[Any, Any]:
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = function(x)
        first = inner.gradient(y, x)
    return first, outer.gradient(first, x)


@pytest.mark.parametrize("rounds", [1, 3])
def test_second_order_is_undisturbed(rounds: int) -> None:
    x = normal(3)

    def program(x: Any) -> Any:
        return tf.reduce_sum(tf.tanh(x) ** 3.0)

    plain = second(program, x)
    seen, watch = watching_backward()
    with apply(watch, idle()):
        for _ in range(rounds):
            seen.clear()
            equal(second(program, x), plain)
    # Every op of the gradient of the gradient belongs to a forward op as well.
    assert {op for op, forward in seen if forward is None} <= {"AddN", "Fill"}
    assert Counter(seen)["TanhGrad", "Tanh"] >= 2


def test_second_order_ops_are_seen_after_first_order_was_quiet() -> None:
    x = normal(3)
    analysed: list[str] = []
    with apply(tool(lambda c: analysed.append(c.name), backward=True)):
        for _ in range(2):
            gradient(tf.tanh, x)
        before_second = len(analysed)
        second(tf.tanh, x)
    assert len(analysed) > before_second


def test_straight_through_edit_in_second_order() -> None:
    x = normal(3)
    with apply(before("Exp", double)):
        results = [second(tf.exp, x) for _ in range(2)]
    # d/dx is exp at the edited value; its own derivative passes straight through again.
    close(results[0][0], tf.exp(2.0 * x))
    close(results[0][1], tf.exp(2.0 * x))
    equal(results[0], results[1])


def test_straight_through_edit_of_a_product_in_second_order() -> None:
    x = normal(3)
    with apply(before("Square", double)):
        first, again = second(tf.square, x)
    equal(first, 2.0 * (2.0 * x))
    equal(again, tf.fill([3], 2.0))


def test_autodiff_edit_in_second_order() -> None:
    x = normal(3)

    def insert(context: OpContext) -> None:
        with autodiff_enabled():
            context.insert_before_op(lambda v: v * v)

    with apply(tool(insert, "Exp")):
        first, again = second(tf.exp, x)
    expected = second(lambda v: tf.exp(v * v), x)
    close(first, expected[0])
    close(again, expected[1])


@pytest.mark.parametrize("make", [at_inputs, at_outputs])
def test_edited_gradients_are_differentiated_straight_through(make: Any) -> None:
    x = normal(3)
    with apply(make("Square", double)):
        first, again = second(tf.square, x)
    equal(first, 2.0 * x * 2.0)
    # An edited contribution counts as 2 x; an edited gradient, now 2, was a factor of 2 x.
    equal(again, tf.fill([3], 2.0 if make is at_inputs else 4.0))


def test_raw_edit_in_second_order() -> None:
    x = normal(3)

    def analyse(context: OpContext) -> None:
        if context.forward is not None and context.forward.op_type == "Tanh":
            context.insert_after_backward_op(lambda *g: None)

    plain = second(tf.tanh, x)
    with apply(tool(analyse, backward=True)):
        for _ in range(2):
            equal(second(tf.tanh, x), plain)


def test_replaced_backward_is_differentiated_as_written() -> None:
    x = normal(3)
    with apply(replacing_backward("Exp", lambda g: g * x * x)):
        first, again = second(tf.exp, x)
    equal(first, x * x)
    equal(again, 2.0 * x)


# Jacobians.


@pytest.mark.parametrize("pfor", [True, False])
def test_jacobian_of_an_edited_program(pfor: bool) -> None:
    x, w = normal(3), normal(3, 2, seed=1)

    def jacobian() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.tanh(tf.linalg.matvec(w, tf.exp(x), transpose_a=True))
        return tape.jacobian(y, x, experimental_use_pfor=pfor)

    plain = jacobian()
    with apply(idle()):
        close(jacobian(), plain)
    with apply(before("Exp", double)):
        edited = jacobian()
    inner = tf.exp(2.0 * x)
    outer = 1.0 - tf.tanh(tf.linalg.matvec(w, inner, transpose_a=True)) ** 2.0
    close(edited, outer[:, None] * tf.transpose(w) * inner[None, :])


def test_batch_jacobian_of_an_edited_program() -> None:
    x = normal(2, 3)
    with apply(before("Exp", double), idle()):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.exp(x)
        found = tape.batch_jacobian(y, x)
    close(found, tf.linalg.diag(tf.exp(2.0 * x)))


def jacobian_of_exp(x: Any, pfor: bool) -> Any:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = tf.exp(x)
    return tape.jacobian(y, x, experimental_use_pfor=pfor)


def test_gradient_routines_run_in_a_vectorised_jacobian() -> None:
    """Run a host routine row after row, as without pfor, and inline a staged one."""
    x = normal(3)

    plain, calls = jacobian_of_exp(x, False), []
    for pfor in (False, True):
        with apply(at_inputs("Exp", lambda g: calls.append(tuple(g.shape)))):
            close(jacobian_of_exp(x, pfor), plain)
    assert calls == [(3,)] * 6
    for routine in (double, staged(lambda g: g * 2.0)):
        with apply(at_inputs("Exp", routine)):
            for pfor in (False, True):
                close(jacobian_of_exp(x, pfor), tf.linalg.diag(tf.exp(x) * 2.0))
    close(jacobian_of_exp(x, True), plain)


def test_edits_in_a_vectorised_jacobian_that_is_differentiated_pass_straight() -> None:
    x, w = normal(3), normal(3, 3, seed=1)

    def hessian(pfor: bool) -> Any:
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(tf.tanh(tf.linalg.matvec(w, x)) ** 2.0)
            gradient = tape.gradient(y, x)
        return outer.jacobian(gradient, x, experimental_use_pfor=pfor)

    with apply(at_inputs("Tanh", double)):
        close(hessian(True), hessian(False))


def test_raw_backward_routine_in_a_vectorised_jacobian_is_refused() -> None:
    x = normal(3)

    made = tool(lambda c: c.insert_after_backward_op(lambda g: g * 2.0), "Mul", backward=True)
    with apply(made):
        jacobian_of_exp(x, False)
        with pytest.raises(UnsupportedError, match="jacobian"):
            jacobian_of_exp(x, True)


# Forward mode.


def test_forward_accumulator_sees_edits_straight_through() -> None:
    x, tangent = normal(3), normal(3, seed=4)

    def jvp() -> tuple[Any, Any]:
        with tf.autodiff.ForwardAccumulator(x, tangent) as acc:
            y = tf.square(tf.exp(x))
        return y, acc.jvp(y)

    plain = jvp()
    with apply(idle()):
        for _ in range(3):
            equal(jvp(), plain)
    with apply(before("Exp", double), after("Square", lambda v: v + 1.0)):
        y, found = jvp()
    inner = tf.exp(2.0 * x)
    close(y, inner**2.0 + 1.0)
    close(found, 2.0 * inner * inner * tangent)


def test_forward_over_backward() -> None:
    x, tangent = normal(3), normal(3, seed=4)

    def hvp() -> Any:
        with tf.autodiff.ForwardAccumulator(x, tangent) as acc:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(tf.tanh(x) ** 3.0)
            grad = tape.gradient(y, x)
        return acc.jvp(grad)

    plain = hvp()
    with apply(idle()):
        for _ in range(2):
            close(hvp(), plain)


# Functions with gradients of their own.


@tf.custom_gradient
def clipped(x: Any) -> Any:
    def grad(upstream: Any) -> Any:
        return tf.clip_by_value(upstream, -0.5, 0.5)

    return tf.exp(x), grad


def test_ops_of_a_custom_gradient_are_backward_ops() -> None:
    x = normal(3)
    plain = gradient(lambda x: clipped(x) * 3.0, x)
    equal(plain[1][0], tf.fill([3], 0.5))
    seen, watch = watching_backward()
    with apply(watch, idle()):
        for _ in range(3):
            seen.clear()
            equal(gradient(lambda x: clipped(x) * 3.0, x), plain)
            assert ("Minimum", "Identity") in seen
            assert ("Maximum", "Identity") in seen
    with apply(before("Exp", double)):
        value, (grad,) = gradient(lambda x: clipped(x) * 3.0, x)
    equal(value, tf.exp(2.0 * x) * 3.0)
    equal(grad, tf.fill([3], 0.5))


def test_quiet_custom_gradients_stay_right() -> None:
    x = normal(3)
    plain = gradient(lambda x: clipped(tf.tanh(x)) * 3.0, x)
    with apply(idle()):
        for _ in range(4):
            equal(gradient(lambda x: clipped(tf.tanh(x)) * 3.0, x), plain)


# Recomputation.


def recomputing(w: tf.Variable) -> Any:
    @tf.recompute_grad
    def block(x: Any) -> Any:
        return tf.tanh(tf.matmul(tf.exp(x), w))

    return block


def test_recomputed_function_sees_the_same_edits() -> None:
    x, w = normal(2, 3), variable(3, 3)
    block = recomputing(w)

    def program(x: Any, w: Any) -> Any:
        return tf.reduce_sum(block(x) * 2.0)

    def reference(x: Any, w: Any) -> Any:
        return tf.reduce_sum(tf.tanh(tf.matmul(tf.exp(x), w)) * 2.0)

    tools = (before("Exp", double), before("MatMul", double, [1]), at_inputs("Tanh", double))
    with apply(*tools):
        expected = gradient(reference, x, w)
        results = [gradient(program, x, w) for _ in range(3)]
    for value, grads in results:
        close(value, expected[0])
        close(grads[0], expected[1][0])
        close(grads[1], expected[1][1])


def test_recomputed_ops_are_the_same_ops_marked_as_rerun() -> None:
    x, w = normal(2, 3), variable(3, 3)
    block = recomputing(w)
    seen: list[tuple[int, bool]] = []

    def analyse(context: OpContext) -> None:
        if context.op_type in ("Exp", "MatMul", "Tanh"):
            seen.append((context.get_op_id(), context.recomputed))

    backward, watch = watching_backward()
    ops, watch_ops = watching()
    with apply(tool(analyse), watch, watch_ops):
        gradient(lambda x, w: block(x), x, w)
        first = [number for number, again in seen if not again]
        assert len(first) == 3
        assert all(not again for _, again in seen)  # Analysed once; the rerun is the same op.
        assert Counter(ops)["Exp"] == 2
        assert Counter(backward)["TanhGrad", "Tanh"] == 1


def test_recomputed_edits_after_leaving_are_refused() -> None:
    x, w = normal(2, 3), variable(3, 3)
    block = recomputing(w)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with apply(before("Exp", double)):
            y = block(x)
    with pytest.raises(UnsupportedError, match="recomputed"):
        tape.gradient(y, x)


# Too late, disabled, elsewhere.


def test_gradient_after_leaving_keeps_edits_warns_once_and_runs_no_routine() -> None:
    x = normal(3)
    got: list[Any] = []
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        with apply(before("Exp", double), at_inputs("Tanh", noting(got, lambda g: g * 0.0))):
            y = tf.tanh(tf.exp(x))
    with pytest.warns(AmandaWarning, match="inside `apply`") as caught:
        grad = tape.gradient(y, x)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    inner = tf.exp(2.0 * x)
    close(grad, (1.0 - tf.tanh(inner) ** 2.0) * inner)
    assert got == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tape.gradient(y, x)


def test_backward_tool_left_too_early_gives_one_warning() -> None:
    x = normal(3)
    seen, watch = watching_backward()
    with tf.GradientTape() as tape:
        tape.watch(x)
        with apply(watch):
            y = tf.tanh(tf.exp(x))
    with pytest.warns(AmandaWarning) as caught:
        tape.gradient(y, x)
    assert len(caught) == 1
    assert seen == []


def test_an_inner_tool_left_before_the_gradient_is_missed_with_one_warning() -> None:
    x = normal(3)
    with apply(idle()):
        inner = attach(at_inputs("Exp", lambda g: g * 0.0))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(tf.exp(x))
        inner.remove()
        with pytest.warns(AmandaWarning) as caught:
            grad = tape.gradient(y, x)
    assert len(caught) == 1
    assert not any(grad == 0.0)


def test_disabled_counts_as_it_stands_when_the_gradient_is_computed() -> None:
    x = normal(3)
    with apply(before("Exp", double), at_inputs("Exp", lambda g: g * 0.0)):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = tf.exp(x)
        with disabled():
            off = tape.gradient(y, x)
        on = tape.gradient(y, x)
        with tf.GradientTape() as other, disabled():
            other.watch(x)
            z = tf.exp(x)
        forward_off = other.gradient(z, x)
    equal(off, tf.exp(2.0 * x))
    equal(on, tf.zeros(3))
    equal(forward_off, tf.exp(x))


def test_replaced_backward_after_leaving_is_refused() -> None:
    x = normal(3)
    with tf.GradientTape() as tape:
        tape.watch(x)
        with apply(replacing_backward("Exp", lambda g: g)):
            y = tf.exp(x)
    with pytest.warns(AmandaWarning), pytest.raises(UnsupportedError, match="replaced"):
        tape.gradient(y, x)


def test_gradient_in_another_thread_belongs_to_the_session_of_its_forward() -> None:
    x = normal(3)
    seen, watch = watching_backward()
    grads: list[Any] = []
    with apply(at_inputs("Exp", double), watch):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(tf.exp(x))
        thread = threading.Thread(target=lambda: grads.append(tape.gradient(y, x)))
        thread.start()
        thread.join()
    close(grads[0], (1.0 - tf.tanh(tf.exp(x)) ** 2.0) * tf.exp(x) * 2.0)
    assert ("TanhGrad", "Tanh") in seen


def test_forward_outside_and_gradient_inside() -> None:
    x = normal(3)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.tanh(tf.exp(x))
    seen, watch = watching_backward()
    with apply(watch):
        grad = tape.gradient(y, x)
    close(grad, (1.0 - tf.tanh(tf.exp(x)) ** 2.0) * tf.exp(x))
    # Only what starts a backward pass is seen.
    assert set(seen) <= {("Fill", None)}
