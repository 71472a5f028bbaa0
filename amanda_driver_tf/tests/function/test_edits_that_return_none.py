"""Edits that are refused where a graph has no place for them, whose routines return None: no edits.

Each program is refused once a routine edits, and runs as without tools while none does.
"""

# mypy: allow-untyped-calls
# TensorFlow has no types.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import Edit, Everywhere, editing

from ..comparison import close
from .differentiation import gradients_inside, gradients_outside
from .handwritten_programs import W, X
from .reference_programs import Ops

v1 = tf.compat.v1
SHIFT = tf.constant(0.5, X.dtype)


def layer(o: Ops, x: Any, w: Any) -> Any:
    return o("Tanh", "t1", o("MatMul", "m1", x, w))


def jacobian(o: Ops) -> list[Any]:
    """Compute a Jacobian, for which pfor vectorizes the function's gradient in another graph."""
    function = tf.function(lambda x, w: layer(o, x, w), autograph=False)
    with tf.GradientTape() as tape:
        tape.watch([X, W])
        y = function(X, W)
    return list(tape.jacobian(y, [X, W]))


def gradient_in_a_graph(o: Ops) -> list[Any]:
    function = tf.function(lambda x, w: layer(o, x, w), autograph=False)
    with tf.GradientTape() as tape:
        tape.watch([X, W])
        y = function(X, W)
    return list(tf.function(lambda: tape.gradient(y, [X, W]))())


def accumulator(o: Ops) -> list[Any]:
    function = tf.function(lambda x, w: layer(o, x, w), autograph=False)
    with tf.autodiff.ForwardAccumulator(X, tf.ones_like(X)) as followed:
        y = function(X, W)
    return [y, followed.jvp(y)]


def eager_jacobian(o: Ops) -> list[Any]:
    """Compute a Jacobian whose backward ops were analysed before by an eager gradient."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([X, W])
        y = layer(o, X, W)
    return [*tape.gradient(y, [X, W]), *tape.jacobian(y, [X, W])]


@pytest.mark.slow
@pytest.mark.parametrize("program", [jacobian, gradient_in_a_graph, accumulator, eager_jacobian])
def test_gradients_that_become_part_of_a_graph(program: Callable[[Ops], list[Any]]) -> None:
    wanted = program(Ops())
    with amanda.apply(Everywhere(lambda *values: None, aligned=False)):
        close(program(Ops()), wanted)
    edits = Everywhere(lambda *values: [_doubled(value) for value in values], aligned=False)
    with amanda.apply(edits), pytest.raises(UnsupportedError):
        program(Ops())
    close(program(Ops()), wanted)


def batch_jacobian(o: Ops) -> list[Any]:
    function = tf.function(lambda x: tf.tanh(layer(o, x, W)), autograph=False)
    with tf.GradientTape() as tape:
        tape.watch(X)
        y = function(X)
    return [tape.batch_jacobian(y, X)]


def third_order(o: Ops) -> list[Any]:
    """Compute a third derivative, whose gradient function reads what the second one has saved."""
    function = tf.function(lambda x: o("Exp", "e1", x) * x**3, autograph=False)
    with tf.GradientTape() as third:
        third.watch(X)
        with tf.GradientTape() as second:
            second.watch(X)
            with tf.GradientTape() as first:
                first.watch(X)
                y = function(X)
            once = first.gradient(y, X)
        twice = second.gradient(once, X)
    return [once, twice, third.gradient(twice, X)]


@pytest.mark.parametrize("program", [jacobian, batch_jacobian, third_order])
def test_gradients_of_forward_ops(program: Callable[[Ops], list[Any]]) -> None:
    wanted = program(Ops())
    with amanda.apply(Everywhere(lambda *values: None, aligned=True)):
        close(program(Ops()), wanted)


def tangent_in_a_graph(o: Ops, with_gradient: bool = False) -> list[Any]:
    """Compute a tangent in a function: of its result, or of a gradient that it computes."""

    def run(x: Any, w: Any) -> list[Any]:
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as followed:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(o, x, w)
            if with_gradient:
                y = tape.gradient(y, x)
        return [y, followed.jvp(y)]

    return list(tf.function(run, autograph=False)(X, W))


def test_ops_that_only_a_tangent_follows_have_no_gradient() -> None:
    wanted = tangent_in_a_graph(Ops())
    calls: list[Any] = []
    with amanda.apply(Everywhere(lambda *values: None, aligned=True)):
        close(tangent_in_a_graph(Ops()), wanted)
    with amanda.apply(editing(Edit("t1", "grad_out", calls.append, 0))) as handle:
        close(tangent_in_a_graph(Ops()), wanted)
        gaps = {gap.what: gap.why for gap in handle.coverage()["tensorflow"]}
    assert calls == []
    assert "and no gradients" in gaps["gradients of 't1'"]
    edit = Edit("t1", "replace", tf.tanh)
    with amanda.apply(editing(edit)), pytest.raises(UnsupportedError):
        tangent_in_a_graph(Ops())


def test_a_gradient_that_a_tangent_follows_is_not_edited() -> None:
    with (
        amanda.apply(editing(Edit("t1", "grad_out", lambda value: value * 2, 0))),
        pytest.raises(UnsupportedError),
    ):
        tangent_in_a_graph(Ops(), with_gradient=True)


def _doubled(value: Any) -> Any:
    return value * 2 if tf.is_tensor(value) and value.dtype.is_floating else value


def asking(o: Ops, x: Any, w: Any) -> Any:
    """Return a custom gradient that computes a gradient itself, and does not tell which one it
    returns.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(x: Any) -> Any:
        def back(given: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = o("AddV2", "a1", x, SHIFT)
            return tape.gradient(y, x, given)

        return x * 1.0, back

    return tf.reduce_sum(tf.tanh(run(x) * w))


class Once:
    """Returns a value only in the last of several calls."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, value: Any) -> Any:
        self.calls -= 1
        return None if self.calls else value * 2


@pytest.mark.parametrize("differentiate", [gradients_inside, gradients_outside])
def test_gradients_of_which_nobody_knows_which_is_meant(differentiate: Any) -> None:
    wanted = differentiate(asking, Ops([]), [X, X * 0.7], False)
    routine = Once(2)
    with amanda.apply(editing(Edit("a1", "grad_out", routine, 0))):
        close(differentiate(asking, Ops(), [X, X * 0.7], True), wanted)
        with pytest.raises(UnsupportedError, match="computes itself"):
            differentiate(asking, Ops(), [X, X * 0.7], True)
    assert routine.calls == 0
    for edit in (
        Edit("a1", "grad_out", amanda.staged(lambda value: value * 2), 0),
        Edit("a1", "grad_out", lambda value: None, 0, autodiff=True),
        Edit("a1", "replace", tf.add),
    ):
        with amanda.apply(editing(edit)), pytest.raises(UnsupportedError):
            differentiate(asking, Ops(), [X, X * 0.7], True)
