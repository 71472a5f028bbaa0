"""One tensor that is several gradients at once, which TensorFlow passes on without an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import Edit, around, editing

from ..comparison import close
from .differentiation import IN_SESSIONS, WAYS, check, gradients_inside, gradients_outside
from .reference_programs import Ops, values

pytestmark = pytest.mark.slow

X, W = (value * 0.5 for value in values((3, 3), (3, 3)))
SHIFT = X.numpy()
EVERY = [*WAYS, *IN_SESSIONS]


def wave(value: Any) -> Any:
    return tf.sin(value) * 2


# An addition hands on what arrives to both of its inputs. Where they are outputs of one op, its
# gradient is given one tensor for both.


def of_a_call(o: Ops, x: Any, w: Any) -> Any:
    def both(x: Any, w: Any) -> Any:
        return tf.tanh(x), tf.sin(w)

    return o("Sum", "s1", o("AddV2", "a1", *o.call(both, x, w)))


def of_a_loop(o: Ops, x: Any, w: Any) -> Any:
    def turn(x: Any, w: Any) -> Any:
        return [tf.tanh(x), tf.sin(w)]

    return o("Sum", "s1", o("AddV2", "a1", *o.loop(2, turn, x, w)))


def of_a_split(o: Ops, x: Any, w: Any) -> Any:
    left, right = tf.split(tf.concat([tf.tanh(x), tf.sin(w)], 0), 2)
    return o("Sum", "s1", o("AddV2", "a1", left, right))


def of_an_unstacked(o: Ops, x: Any, w: Any) -> Any:
    left, right = tf.unstack(tf.stack([tf.tanh(x), tf.sin(w)]))
    return o("Sum", "s1", o("AddV2", "a1", left, right))


AT_ADDITION = [
    Edit("a1", "grad_in", wave, 0),
    Edit("a1", "grad_in", wave, 1),
    Edit("a1", "backward", lambda g: (wave(g), g * 3)),
    Edit("a1", "before", wave, 1, autodiff=True),
    Edit("a1", "replace", lambda a, b: tf.sin(a) * b + a),
]


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("program", [of_a_call, of_a_loop, of_a_split, of_an_unstacked])
def test_one_gradient_for_several_outputs_of_an_op(program: Any, way: str) -> None:
    for edit in AT_ADDITION:
        check(program, [X, W], [edit], way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_custom_gradient_does_not_say_which_of_them_it_reads(way: str, swapped: bool) -> None:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def both(x: Any, w: Any) -> Any:
        def back(one: Any, other: Any) -> Any:
            return (other * 2, one - other) if swapped else (one * 2, other - one)

        return (tf.tanh(x), tf.sin(w)), back

    def program(o: Ops, x: Any, w: Any) -> Any:
        return o("Sum", "s1", o("AddV2", "a1", *both(x, w)))

    check(program, [X, W], [Edit("a1", "grad_out", wave, 0)], way)
    with pytest.raises(UnsupportedError, match="several outputs of 'IdentityN'"):
        check(program, [X, W], [Edit("a1", "grad_in", wave, 1)], way)


def test_an_identity_and_what_it_reads_are_one_input_of_a_branch() -> None:
    def program(o: Ops, x: Any, w: Any) -> Any:
        same = o("Identity", "i1", x)
        y = o.choose(
            tf.reduce_sum(w) > 1e9,
            lambda: o("Mul", "p1", same, x),
            lambda: o("Mul", "p2", o("Mul", "p3", same, w), x),
        )
        return tf.reduce_sum(y)

    for way in EVERY:
        check(program, [X, W], [Edit("p3", "grad_out", wave, 0)], way)


# A gradient function that recomputes may return the gradient it was passed as its own.


def doubled(o: Ops, x: Any, w: Any) -> Any:
    def block(x: Any) -> Any:
        h = x * x
        return o("AddV2", "a1", h, h)

    return tf.reduce_sum(tf.tanh(tf.recompute_grad(block)(x) * w))


def shifted(o: Ops, x: Any, w: Any) -> Any:
    return tf.reduce_sum(tf.tanh(tf.recompute_grad(lambda x: o("AddV2", "a1", x, SHIFT))(x) * w))


def residual(o: Ops, x: Any, w: Any) -> Any:
    block = tf.recompute_grad(lambda x: o("AddV2", "a1", x, tf.tanh(x)))
    return tf.reduce_sum(tf.tanh(block(x)) * w)


@pytest.mark.parametrize("way", [*WAYS, "session"])
@pytest.mark.parametrize("program", [doubled, shifted, residual])
def test_gradients_that_a_recomputed_addition_hands_on(program: Any, way: str) -> None:
    for edit in [*AT_ADDITION[:2], Edit("a1", "after", wave, 0, autodiff=True)]:
        if program is not shifted or edit.position == 0:
            check(program, [X, W], [edit], way)


def behind_recomputed(o: Ops, x: Any, w: Any) -> Any:
    block = tf.recompute_grad(lambda x: tf.nn.softplus(x))
    return tf.reduce_sum(o("Mul", "p1", block(x), w))


def behind_asking(o: Ops, x: Any, w: Any) -> Any:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def asking(x: Any) -> Any:
        def back(given: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.sin(x)
            return tape.gradient(y, x, given)

        return tf.sin(x), back

    return tf.reduce_sum(o("Mul", "p1", asking(x), w))


def between_recomputed(o: Ops, x: Any, w: Any) -> Any:
    inner = tf.recompute_grad(lambda x: tf.nn.softplus(x))
    outer = tf.recompute_grad(lambda x: o("Mul", "p1", inner(x * x), x))
    return tf.reduce_sum(outer(x) * w)


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("program", [behind_recomputed, behind_asking, between_recomputed])
def test_what_a_gradient_function_begins_with_is_what_it_was_given(program: Any, way: str) -> None:
    for edit in (Edit("p1", "grad_in", wave, 0), Edit("p1", "before", wave, 0, autodiff=True)):
        check(program, [X, W], [edit], way)


@pytest.mark.parametrize("scale", [1, 2])
def test_a_differentiation_begun_with_the_result_of_another(scale: int) -> None:
    def program(x: Any, w: Any) -> Any:
        h, k = tf.tanh(x), tf.sin(w)
        y = tf.raw_ops.AddV2(x=h * 1.0, y=k, name="a1")
        (first,) = tf.gradients(tf.reduce_sum(y * y), k)
        return tf.gradients(h, x, first * scale if scale > 1 else first)[0]

    def reference(x: Any, w: Any) -> Any:
        y = tf.tanh(x) + tf.sin(w)
        return wave(2 * y) * scale * (1 - tf.tanh(x) ** 2)

    function = tf.function(program, autograph=False)
    with amanda.apply(editing(Edit("a1", "grad_in", wave, 1))):
        close(function(X, W), reference(X, W))


def custom_in_recomputed(o: Ops, x: Any, w: Any) -> Any:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def squared(x: Any) -> Any:
        y = o("Square", "q1", x * 2)
        return y, lambda g: g * tf.sin(y) * x

    return tf.reduce_sum(tf.recompute_grad(lambda x: tf.tanh(squared(x)))(x) * w)


@pytest.mark.parametrize("way", [*WAYS, "session"])
@pytest.mark.parametrize("kind", ["before", "after", "replace"])
def test_custom_gradients_are_recomputed_as_edited(kind: str, way: str) -> None:
    check(custom_in_recomputed, [X, W], [Edit("q1", kind, wave, 0)], way)


@pytest.mark.parametrize("differentiate", [gradients_outside, gradients_inside])
def test_every_recomputed_op_is_a_forward_op(differentiate: Callable[..., Any]) -> None:
    counted, watch = around()
    with amanda.apply(watch):
        differentiate(custom_in_recomputed, Ops(), [X, W], True)
    assert counted["Square", "before"] == counted["Square", "after"] == 2
    # That of the program, twice; it is not part of the custom gradient's gradient function.
    assert counted["Tanh", "before"] == 2


@pytest.mark.parametrize("way", ["outside", "inside", "session"])
@pytest.mark.parametrize(
    "returned",
    [lambda given, asked: given, lambda given, asked: asked, lambda given, asked: given + asked],
    ids=["given", "asked", "both"],
)
def test_a_custom_gradient_that_asks_does_not_say_which_it_returns(
    returned: Callable[..., Any], way: str
) -> None:
    def program(o: Ops, x: Any, w: Any) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def asking(x: Any) -> Any:
            def back(given: Any) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = o("AddV2", "a1", x, SHIFT)
                return returned(given, tape.gradient(y, x, given))

            return x * 1.0, back

        return tf.reduce_sum(tf.tanh(asking(x) * w))

    with pytest.raises(UnsupportedError, match="computes itself"):
        check(program, [X, W], [Edit("a1", "grad_out", wave, 0)], way)


# A tensor of the forward program may be a gradient, too: a differentiation is begun with it, or a
# custom gradient returns it.


def its_own_output(o: Ops, x: Any, w: Any) -> Any:
    y = o("Sigmoid", "s1", x * w)
    return y, y


def its_own_input(o: Ops, x: Any, w: Any) -> Any:
    h = tf.sin(x)
    return o("Mul", "p1", h, tf.cos(w)), h


def of_an_identity(o: Ops, x: Any, w: Any) -> Any:
    y = tf.multiply(x, w)
    return o("Identity", "i1", y), y


def of_a_sum(o: Ops, x: Any, w: Any) -> Any:
    y = o("Sigmoid", "s1", x)
    return o("AddV2", "a1", y, w * 1.0), y


@pytest.mark.parametrize("program", [its_own_output, its_own_input, of_an_identity, of_a_sum])
def test_a_differentiation_begun_with_what_is_read(program: Any) -> None:
    def differentiate(o: Ops, x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            result, begun_with = program(o, x, w)
        return [result, *tape.gradient(result, [x, w], output_gradients=begun_with)]

    function = tf.function(lambda x, w: differentiate(Ops(), x, w), autograph=False)
    for name in {"s1", "p1", "i1", "a1"}:
        for edit in (
            Edit(name, "before", wave, 0),
            Edit(name, "after", wave, 0),
            Edit(name, "after", wave, 0, autodiff=True),
            Edit(name, "grad_out", wave, 0),
        ):
            with amanda.apply(editing(edit)):
                found = function(X, W)
            close(found, differentiate(Ops([edit]), X, W))


@pytest.mark.parametrize("way", EVERY)
def test_a_custom_gradient_that_returns_what_is_read(way: str) -> None:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def doubled(x: Any) -> Any:
        return tf.tanh(x) * 2, lambda g: x

    def program(o: Ops, x: Any, w: Any) -> Any:
        return o("Exp", "e1", doubled(o("Sigmoid", "s1", x * w)))

    for edit in (
        Edit("s1", "after", wave, 0),
        Edit("s1", "after", wave, 0, autodiff=True),
        Edit("s1", "grad_out", wave, 0),
    ):
        check(program, [X, W], [edit], way)


def test_recomputed_edits_leave_nothing() -> None:
    """The function is traced without tools, which are then applied and removed."""
    program = tf.function(lambda x, w: custom_in_recomputed(Ops(), x, w))

    def gradients() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([X, W])
            result = program(X, W)
        return list(tape.gradient(result, [X, W]))

    plain = gradients()
    with amanda.apply(editing(Edit("q1", "before", wave, 0))):
        edited = gradients()
    again = gradients()
    for before, between, after in zip(plain, edited, again, strict=True):
        assert not np.allclose(before, between)
        tf.debugging.assert_equal(before, after)
