"""Observers in sessions: random sequences and the gradients of gradients are those of the graph."""

# mypy: allow-untyped-calls
# TensorFlow has no types.

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import amanda

v1 = tf.compat.v1


def drawn() -> list[bytes]:
    """Return the results of two kinds of runs, each made twice, that share a random op."""
    found: list[Any] = []
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, (2, 3))
        y = tf.tanh(x + v1.random_normal(tf.shape(x), seed=3))
        (first,) = tf.gradients(y, x)
        (second,) = tf.gradients(first, x)
        for _ in range(2):
            found += session.run([y, second], {x: np.ones((2, 3))})
            found += session.run([first], {x: np.ones((2, 3))})
    return [value.tobytes() for value in found]


def test_a_random_op_keeps_its_sequence() -> None:
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        context.insert_before_op(lambda *values: None, observe=True)
        context.insert_after_op(lambda *values: None, observe=True)
        context.insert_after_backward_op(lambda *values: None, observe=True)

    tool.add_inst_for_op(analyse)
    expected = drawn()
    with amanda.apply(tool):
        found = drawn()
    assert found == expected
