"""Ops through which TensorFlow propagates no gradient, and gradients that nothing reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda_core.errors import RoutineResultError, UnsupportedError
from amanda_core.testing.kit.tools import at_inputs, before, replacing, replacing_backward

from ..comparison import close
from .differentiation import EAGER, WAYS, gradients_inside, gradients_outside
from .reference_programs import Ops

v1 = tf.compat.v1

X = tf.constant([0.3, 0.6, 1.7])


def rounding(o: Ops, x: Any) -> Any:
    return tf.reduce_sum(tf.sin(tf.round(x) * x))


def in_session(program: Callable[..., Any], wanted: Callable[[Any, Any], Any]) -> Any:
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [3])
        result = wanted(program(Ops(), x), x)
        with v1.Session() as session:
            return session.run(result, {x: X.numpy()})


def session_gradient(program: Callable[..., Any], *_: Any) -> Any:
    return in_session(program, lambda y, x: v1.gradients(y, x)[0])


@tf.custom_gradient  # type: ignore[untyped-decorator]
def straight_through(x: Any) -> Any:
    return tf.round(x), lambda gradient: gradient


def test_eager_tapes_follow_what_replaces_it() -> None:
    """The gradient of round(x) * x is then round(x) + x."""
    expected = tf.cos(tf.round(X) * X) * (tf.round(X) + X)
    for tool in (replacing_backward("Round", lambda g: g), replacing("Round", straight_through)):
        with amanda.apply(tool):
            close(EAGER["eager"](rounding, Ops(), [X], False)[1], expected)


@pytest.mark.parametrize("way", [*WAYS, "session"])
@pytest.mark.parametrize("kind", ["backward", "op"])
def test_graphs_refuse_what_would_be_lost(kind: str, way: str) -> None:
    if kind == "backward":
        tool = replacing_backward("Round", lambda g: g)
    else:
        tool = replacing("Round", straight_through)
    gradient = session_gradient if way == "session" else WAYS[way]
    with amanda.apply(tool), pytest.raises(UnsupportedError, match="propagates no"):
        gradient(rounding, Ops(), [X], True)
    plain = gradients_inside(rounding, Ops(), [X], False)
    close(gradients_outside(rounding, Ops(), [X], True), plain)


@pytest.mark.parametrize("differentiate", [gradients_inside, gradients_outside])
def test_a_replacement_without_gradient_is_none_that_is_lost(differentiate: Any) -> None:
    with amanda.apply(replacing("Round", tf.floor)):
        found = differentiate(rounding, Ops(), [X], True)
        expected = gradients_inside(rounding, Ops(), [X], False)
    close(found, expected)
    close(found[1], tf.cos(tf.floor(X) * X) * tf.floor(X))


def test_nobody_differentiates() -> None:
    tool = replacing_backward("Round", lambda g: g)
    with amanda.apply(tool):
        close(tf.function(rounding)(Ops(), X), rounding(Ops(), X))
        factor = [0.2, 1.9, 2.6]
        constant = tf.function(lambda x: tf.reduce_sum(tf.round(tf.constant(factor)) * x))
        with tf.GradientTape() as tape:
            tape.watch(X)
            result = constant(X)
        close(tape.gradient(result, X), tf.round(factor))
        # There is a gradient in the graph, which does not run.
        forward = in_session(rounding, lambda y, x: (y, v1.gradients(y, x))[0])
    close(forward, rounding(Ops(), X))


def padding(o: Ops, x: Any) -> Any:
    """Return a padding value, for which TensorFlow has no gradient."""
    padded = tf.pad(x, [[1, 0]], constant_values=tf.reduce_sum(x))
    return tf.reduce_sum(tf.sin(padded))


@pytest.mark.parametrize("way", [*WAYS])
def test_one_input_without_a_gradient(way: str) -> None:
    def all_but_that(gradient: Any) -> Any:
        return 2 * gradient[1:]

    def every(gradient: Any) -> Any:
        return 2 * gradient[1:], None, gradient[0]

    with amanda.apply(replacing_backward("PadV2", all_but_that)):
        close(WAYS[way](padding, Ops(), [X], True)[1], 2 * tf.cos(X))
    with amanda.apply(replacing_backward("PadV2", every)):
        close(
            EAGER["eager"](padding, Ops(), [X], False)[1],
            2 * tf.cos(X) + tf.cos(tf.reduce_sum(X)),
        )
        with pytest.raises(UnsupportedError, match="gradient for input 2"):
            WAYS[way](padding, Ops(), [X], True)


def test_a_gradient_that_only_the_tool_reads_is_there_in_sessions() -> None:
    """The gradient function of `Sign` returns zeros and reads nothing."""

    def program(o: Ops, x: Any) -> Any:
        return tf.reduce_sum(tf.sin(tf.sign(x) * x))

    expected = tf.cos(tf.sign(X) * X) * (tf.sign(X) + X)
    with amanda.apply(replacing_backward("Sign", lambda g: g)):
        found = session_gradient(program)
    close(found, expected)


def stitched(o: Ops, x: Any) -> Any:
    values = tf.raw_ops.DynamicStitch(indices=[[0, 2, 4], [1, 3, 5]], data=[x, tf.exp(x)])
    return tf.reduce_sum(tf.sin(values))


EVERY: list[Any] = [(gradients_inside, False), (gradients_inside, True), (gradients_outside, True)]


@pytest.mark.parametrize(("differentiate", "function"), EVERY)
def test_lists_of_integers_need_no_gradients(differentiate: Any, function: bool) -> None:
    for none in (None, [None, None]):
        tool = replacing_backward("DynamicStitch", lambda g, none=none: [none, [g[:3], g[3:]]])
        with amanda.apply(tool):
            found = differentiate(stitched, Ops(), [X], function)[1]
        at = tf.cos(tf.reshape(tf.stack([X, tf.exp(X)], 1), [-1]))
        close(found, at[:3] + tf.exp(X) * at[3:])


@pytest.mark.parametrize(("differentiate", "function"), EVERY)
def test_more_gradients_than_inputs(differentiate: Any, function: bool) -> None:
    tool = replacing_backward("DynamicStitch", lambda g: [None, None, g[:3], g[3:]])
    with amanda.apply(tool), pytest.raises(RoutineResultError, match="4 gradients"):
        differentiate(stitched, Ops(), [X], function)
    tool = replacing_backward("DynamicStitch", lambda g: [None, [g[:3], g[3:]], None, None])
    with amanda.apply(tool):
        differentiate(stitched, Ops(), [X], function)


@pytest.mark.parametrize(("differentiate", "function"), EVERY)
def test_gradients_of_inputs_without_any(differentiate: Any, function: bool) -> None:
    seen = []
    with amanda.apply(at_inputs("DynamicStitch", lambda *grads: seen.append(grads))):
        differentiate(stitched, Ops(), [X], function)
    ((indices, data),) = seen
    assert indices == [None, None]
    assert [gradient.shape for gradient in data] == [[3], [3]]


def test_backward_ops_that_run_no_more_are_listed() -> None:
    """The op ran on two versions of one tensor, so its gradient is computed again."""

    def twofold(context: amanda.OpContext) -> None:
        if context.forward is not None and context.forward.op_type == "Mul":
            context.insert_after_backward_op(lambda value: value * 2)

    raw = amanda.Tool()
    raw.add_inst_for_op(twofold, backward=True)

    def program(o: Ops, x: Any) -> Any:
        return tf.raw_ops.Mul(x=x, y=x)

    def unheard(*tools: amanda.Tool) -> list[str]:
        with amanda.apply(*tools) as handle:
            gradients_inside(program, Ops(), [X], True)
            return [each.what for each in handle.coverage()["tensorflow"] if "Mul" in each.what]

    assert unheard(raw) == []
    assert unheard(before("Mul", lambda x: x * 2, 0)) == []
    assert len(unheard(raw, before("Mul", lambda x: x * 2, 0))) == 2
