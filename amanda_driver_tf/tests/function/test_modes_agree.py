"""Edited gradients of gradients, in Python's loop and TensorFlow's: the modes agree.

Where the op's own gradient reads its output, the whole gradient that arrives there has a part that
no reference with `tf.custom_gradient` sees; so the eager mode is what the others are compared with.
"""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda_core.testing.kit.tools import Edit, editing

from ..comparison import close
from .handwritten_programs import W, X


def descended(x: Any, w: Any, looped: bool) -> Any:
    """Run three steps of gradient descent, each with its own tape."""

    def step(a: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(a)
            y = tf.reduce_sum(tf.square(tf.tanh(tf.matmul(a, w))))
        return a - 0.1 * tape.gradient(y, a)

    if looped:
        return tf.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, step(a)), (0, x))[1]
    for _ in range(3):
        x = step(x)
    return x


def differentiated(x: Any, w: Any, looped: bool) -> list[Any]:
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        total = tf.reduce_sum(tf.sin(descended(x, w, looped)))
    return [total, *tape.gradient(total, [x, w])]


@pytest.mark.slow
@pytest.mark.parametrize("mark", [lambda f: f, amanda.staged], ids=["host", "staged"])
@pytest.mark.parametrize("looped", [False, True], ids=["unrolled", "looped"])
@pytest.mark.parametrize("kind", ["before", "after", "grad_out", "grad_in"])
@pytest.mark.parametrize("op_type", ["MatMul", "Tanh"])
def test_gradients_of_gradients_in_loops(op_type: str, kind: str, looped: bool, mark: Any) -> None:
    edit = Edit(op_type, kind, mark(lambda value: value * 0.5), 0)
    plain = differentiated(X, W, False)
    with amanda.apply(editing(edit)):
        wanted = differentiated(X, W, False)
        close(tf.function(differentiated, autograph=False)(X, W, looped), wanted)
    assert any(bool(tf.reduce_any(a != b)) for a, b in zip(plain, wanted, strict=True))
