"""Values and gradients of another shape than the graph, and its gradients, were built for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import Edit, editing

from ..comparison import close, equal
from .reference_programs import new_session, staged, v1

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
W = np.linspace(0.5, -0.5, 6, dtype=np.float32).reshape(3, 2)


def cropped(value: Any) -> Any:
    return value[:2]


def program(shape: list[int | None] | None) -> tuple[Any, list[Any], Any]:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, shape)
        w = tf.constant(W)
        y = tf.tanh(tf.matmul(x, w, name="mm"), name="act")
        loss = tf.reduce_sum(tf.square(y, name="square"))
        return graph, [loss, *v1.gradients(loss, [x, w])], {x: X}


def refused(shape: list[int | None] | None, *edits: Edit) -> str:
    graph, fetches, feed = program(shape)
    with new_session(graph) as session:
        plain = session.run(fetches, feed)
        with amanda.apply(editing(*edits)), pytest.raises(UnsupportedError) as caught:
            session.run(fetches, feed)
        equal(session.run(fetches, feed), plain)
    return str(caught.value)


@pytest.mark.parametrize("staging", [False, True], ids=["host", "staged"])
@pytest.mark.parametrize(
    ("kind", "autodiff"),
    [
        ("before", True),
        ("after", True),
        ("before", False),
        ("after", False),
        ("replace", False),
        ("backward", False),
        ("grad_out", False),
        ("grad_in", False),
    ],
)
def test_another_shape_is_refused(kind: str, autodiff: bool, staging: bool) -> None:
    routine = staged(cropped) if staging else cropped
    position = None if kind in ("replace", "backward") else 0
    message = refused([4, 3], Edit("act", kind, routine, position, autodiff))
    for said in ("shape (2, 2)", "(4, 2)", "op 'act'", "by tool Tool(", "of the same shape"):
        assert said in message


def test_also_behind_what_another_step_put_there() -> None:
    first = Edit("mm", "after", lambda value: value * 1.0, 0)
    message = refused([4, 3], first, Edit("act", "before", cropped, 0, True))
    assert "op 'act'" in message


@pytest.mark.slow
@pytest.mark.parametrize("staging", [False, True], ids=["host", "staged"])
@pytest.mark.parametrize("shape", [[None, 3], [None, None], None])
@pytest.mark.parametrize("kind", ["before", "after", "grad_out", "grad_in"])
def test_a_gradient_that_is_passed_straight_through_has_one_shape(
    kind: str, shape: list[int | None] | None, staging: bool
) -> None:
    routine = staged(cropped) if staging else cropped
    message = refused(shape, Edit("act", kind, routine, 0))
    for said in ("op 'act'", "by tool Tool(", ", routine ", "of the same shape"):
        assert said in message
    assert ("autodiff_enabled()" in message) == (kind in ("before", "after"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "routine"),
    [
        (X, tf.transpose),
        (X, lambda v: tf.reshape(v, [-1])),
        (X, lambda v: v[0]),
        (X, lambda v: v[None]),
        (X[:1], lambda v: tf.concat([v] * 2, 0)),
        (X[0], lambda v: v[:1]),
        (X[0], tf.reduce_sum),
        (X[:1, :1], lambda v: tf.reshape(v, [1])),
        (X[0, :1], lambda v: tf.reshape(v, [])),
        (X[0, :1], lambda v: tf.reshape(v, [1, 1])),
        (X[0, 0], lambda v: tf.reshape(v, [1])),
        (X[:0], lambda v: tf.zeros([1, 3])),
        (X, lambda v: tf.zeros([2, 3])),
        (X[0], lambda v: tf.zeros([2])),
        (X[0], lambda v: tf.zeros([0])),
        (X[:0], lambda v: tf.zeros([0, 0, 3])),
        (X[0, 0], lambda v: tf.zeros([0])),
        (X[:1], lambda v: v[:0]),
    ],
)
@pytest.mark.parametrize("is_rank_known", [True, False])
def test_no_other_shape_passes(value: Any, routine: Any, is_rank_known: bool) -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None] * value.ndim if is_rank_known else None)
        gradients = v1.gradients(tf.negative(tf.negative(x, name="act")), [x])
    with new_session(graph) as session:
        for made in (lambda v: tf.identity(v), routine):
            with amanda.apply(editing(Edit("act", "after", staged(made), 0))):
                if made is not routine:
                    equal(session.run(gradients, {x: value}), [np.ones_like(value)])
                    continue
                with pytest.raises(UnsupportedError, match="op 'act'"):
                    session.run(gradients, {x: value})


def test_staged_routines_that_keep_unknown_shapes_are_right() -> None:
    graph, fetches, feed = program(None)
    edits = [
        Edit("mm", "after", staged(lambda v: v * 2.0), 0),
        Edit("act", "before", staged(lambda v: v + 1.0), 0),
        Edit("act", "grad_out", staged(lambda g: g * 0.5), 0),
    ]
    with new_session(graph) as session, amanda.apply(editing(*edits)):
        found = session.run(fetches, feed)
    y = np.tanh(2 * X @ W + 1)
    through = y * (1 - y**2)
    close(found, [np.sum(y**2), through @ W.T, X.T @ through])


@pytest.mark.parametrize("kind", ["before", "after", "replace"])
def test_another_shape_is_differentiated_where_none_was_built_in(kind: str) -> None:
    graph, fetches, feed = program([None, 3])
    routine = (lambda value: tf.tanh(value)[:2]) if kind == "replace" else cropped
    edit = Edit("act", kind, routine, None if kind == "replace" else 0, kind != "replace")
    with new_session(graph) as session, amanda.apply(editing(edit)):
        found = session.run(fetches, feed)
    x, w = tf.constant(X), tf.constant(W)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        loss = tf.reduce_sum(tf.square(tf.tanh(tf.matmul(x, w))[:2]))
    close(found, [v.numpy() for v in (loss, *tape.gradient(loss, [x, w]))])


def test_a_value_that_has_no_gradient_may_change_its_shape() -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 3])
        w = tf.constant(W)
        loss = tf.reduce_sum(tf.square(tf.matmul(x, w, name="mm")))
        fetches = [loss, *v1.gradients(loss, [w])]
    with new_session(graph) as session:
        wanted = session.run(fetches, {x: X[:2]})
        with amanda.apply(editing(Edit("mm", "before", cropped, 0))):
            close(session.run(fetches, {x: X}), wanted)


def test_handles_are_given_back_as_copies() -> None:
    """An eager handle has no shape, one in a graph has."""
    graph = tf.Graph()
    with graph.as_default():
        stack = tf.raw_ops.StackV2(max_size=3, elem_type=tf.float32, stack_name="", name="stack")
        push = tf.raw_ops.StackPushV2(handle=stack, elem=tf.constant([1.0, 2.0]))
        with tf.control_dependencies([push]):
            popped = tf.raw_ops.StackPopV2(handle=stack, elem_type=tf.float32)
        v1.gradients(tf.square(push), [push])
    edit = Edit("stack", "after", tf.identity, 0)
    with new_session(graph) as session, amanda.apply(editing(edit)):
        equal([session.run(popped)], [np.array([1.0, 2.0], np.float32)])


def halved(a: Any, b: Any) -> Any:
    return tf.matmul(a, b)[:2]


def doubled(value: Any) -> Any:
    return tf.concat([tf.tanh(value)] * 2, 0)


HANDED_ON = [Edit("mm", "replace", halved), Edit("act", "replace", doubled)]


def handed_on() -> list[Any]:
    """Return a loss and its gradients with `HANDED_ON` written in."""
    x, w = tf.constant(X), tf.constant(W)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        loss = tf.reduce_sum(tf.square(doubled(halved(x, w))))
    return [v.numpy() for v in (loss, *tape.gradient(loss, [x, w]))]


@pytest.mark.parametrize("rows", [4, None])
def test_replaced_ops_hand_on_another_shape_which_may_be_fetched(rows: int | None) -> None:
    graph, fetches, feed = program([rows, 3])
    fetches.append(graph.get_tensor_by_name("mm:0"))
    with new_session(graph) as session, amanda.apply(editing(*HANDED_ON)):
        found = session.run(fetches, feed)
    close(found, [*handed_on(), (X @ W)[:2]])


@pytest.mark.parametrize("with_loss", [False, True])
def test_what_is_differentiated_itself_has_one_shape(with_loss: bool) -> None:
    graph, (loss, *_), feed = program([4, 3])
    with graph.as_default():
        mm, x = graph.get_tensor_by_name("mm:0"), next(iter(feed))
        gradient = v1.gradients([mm, loss] if with_loss else mm, x)
    with (
        new_session(graph) as session,
        amanda.apply(editing(*HANDED_ON)),
        pytest.raises(UnsupportedError, match=r"shape \(2, 2\).*replace_op by tool .*op 'mm'"),
    ):
        session.run(gradient, feed)


def test_a_gradient_given_for_another_shape_is_refused() -> None:
    """The gradient of the passed value was built for the shape of its reader's input."""
    graph, fetches, feed = program([4, 3])
    gradient = Edit("act", "backward", lambda g: tf.ones([4, 2]))
    with (
        new_session(graph) as session,
        amanda.apply(editing(*HANDED_ON, gradient)),
        pytest.raises(UnsupportedError, match=r"shape \(2, 2\).*op 'mm'"),
    ):
        session.run(fetches, feed)
