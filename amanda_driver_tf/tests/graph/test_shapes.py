"""Values and gradients of another shape than the graph, and its gradients, were built for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.errors import UnsupportedError
from amanda_core.testing.tools import Edit, editing

from .making import close, equal, new_session, staged, v1

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
W = np.linspace(0.5, -0.5, 6, dtype=np.float32).reshape(3, 2)


def cropped(value: Any) -> Any:
    return value[:2]


def program(shape: list[int | None]) -> tuple[Any, list[Any], Any]:
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, shape)
        w = tf.constant(W)
        y = tf.tanh(tf.matmul(x, w, name="mm"), name="act")
        loss = tf.reduce_sum(tf.square(y, name="square"))
        return graph, [loss, *v1.gradients(loss, [x, w])], {x: X}


def refused(shape: list[int | None], *edits: Edit) -> str:
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


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_gradient_that_is_passed_straight_through_has_one_shape(kind: str) -> None:
    message = refused([None, 3], Edit("act", kind, cropped, 0))
    assert "op 'act'" in message
    assert "autodiff_enabled()" in message


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
    """A handle of its own has no shape, one in a graph has."""
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
