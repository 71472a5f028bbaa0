"""Values and gradients of another shape than a function, and its gradients, were traced for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda_core.errors import UnsupportedError
from amanda_core.testing.tools import Edit, editing

from .making import close, values

X, W = values((4, 3), (3, 2))


def cropped(value: Any) -> Any:
    return value[:2]


def layer(x: Any, w: Any) -> Any:
    return tf.reduce_sum(tf.square(tf.tanh(tf.matmul(x, w, name="mm"), name="act")))


def outside(program: Callable[..., Any]) -> list[Any]:
    """Differentiated by a tape around the call."""
    with tf.GradientTape() as tape:
        tape.watch([X, W])
        result = program(X, W)
    return [result, *tape.gradient(result, [X, W])]


def within(program: Callable[..., Any]) -> Callable[..., Any]:
    """The program with a tape of its own."""

    def run(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            result = program(x, w)
        return result, tape.gradient(result, [x, w])

    return run


def traced(program: Callable[..., Any], rows: int | None) -> Any:
    specs = [tf.TensorSpec([rows, 3], X.dtype), tf.TensorSpec([3, 2], X.dtype)]
    return tf.function(program, input_signature=specs)


def in_branch(x: Any, w: Any) -> Any:
    return tf.cond(tf.reduce_sum(w) > -1e6, lambda: layer(x, w), lambda: tf.zeros([], X.dtype))


def in_loop(x: Any, w: Any) -> Any:
    step = lambda i, total: (i + 1, total + layer(x, w))  # noqa: E731
    return tf.while_loop(lambda i, _: i < 2, step, (0, tf.zeros([], X.dtype)))[1]


@pytest.mark.parametrize("own_tape", [False, True], ids=["tape outside", "tape inside"])
@pytest.mark.parametrize(
    ("kind", "autodiff"),
    [
        ("before", True),
        ("after", True),
        ("before", False),
        ("replace", False),
        ("backward", False),
        ("grad_out", False),
        ("grad_in", False),
    ],
)
def test_another_shape_is_refused(kind: str, autodiff: bool, own_tape: bool) -> None:
    position = None if kind in ("replace", "backward") else 0
    function = traced(within(layer) if own_tape else layer, 4)
    run: Callable[[], Any] = lambda: function(X, W) if own_tape else outside(function)  # noqa: E731
    plain = run()
    edit = Edit("act", kind, cropped, position, autodiff)
    with amanda.apply(editing(edit)), pytest.raises(UnsupportedError) as caught:
        run()
    for said in ("shape (2, 2)", "(4, 2)", "act'", "by tool Tool(", "of the same shape"):
        assert said in str(caught.value)
    close(tf.nest.flatten(run()), tf.nest.flatten(plain))


@pytest.mark.parametrize("program", [in_branch, in_loop, tf.function(layer)])
def test_another_shape_is_refused_in_what_a_function_runs(program: Callable[..., Any]) -> None:
    function = traced(program, 4)
    with (
        amanda.apply(editing(Edit("act", "before", cropped, 0, True))),
        pytest.raises(UnsupportedError, match=r"shape \(2, 2\).*act'.*of the same shape"),
    ):
        outside(function)


def test_also_behind_what_another_step_put_there() -> None:
    edits = [Edit("mm", "after", lambda v: v * 1.0, 0), Edit("act", "before", cropped, 0, True)]
    with (
        amanda.apply(editing(*edits)),
        pytest.raises(UnsupportedError, match=r"shape \(2, 2\).*op 'act'"),
    ):
        outside(traced(layer, 4))


def test_a_gradient_that_is_passed_straight_through_has_one_shape() -> None:
    with (
        amanda.apply(editing(Edit("act", "before", cropped, 0))),
        pytest.raises(UnsupportedError, match=r"autodiff_enabled\(\)"),
    ):
        traced(within(layer), None)(X, W)


@pytest.mark.parametrize("own_tape", [False, True], ids=["tape outside", "tape inside"])
def test_another_shape_is_differentiated_where_none_was_built_in(own_tape: bool) -> None:
    wanted = outside(lambda x, w: tf.reduce_sum(tf.square(tf.tanh(tf.matmul(x, w))[:2])))
    function = traced(within(layer) if own_tape else layer, None)
    with amanda.apply(editing(Edit("act", "after", cropped, 0, True))):
        found = tf.nest.flatten(function(X, W)) if own_tape else outside(function)
    close(found, wanted)
