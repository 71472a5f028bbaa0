"""A value and an `Identity` of it, which TensorFlow takes for one where it leads them to loops."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import Edit

from .differentiation import Unchanged, check
from .reference_programs import Ops, values

X, W = (value * 0.5 for value in values((3, 3), (3, 3)))
SOME = ["outside", "inside", "session"]


def wave(value: Any) -> Any:
    return tf.sin(value) * 2


def custom(o: Ops, x: Any) -> Any:
    """Return a custom gradient that returns an identity of its argument, and reads both."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(x: Any) -> Any:
        y = o("Identity", "i1", x)
        return y, lambda g: g * tf.sin(y) * x

    return o("Tanh", "t1", run(x))


def in_one_op(o: Ops, x: Any, w: Any) -> Any:
    return tf.reduce_sum(o("Mul", "p1", o("Identity", "i1", x), x) * w)


def in_one_op_of_a_loop(o: Ops, x: Any, w: Any) -> Any:
    def turn(x: Any, w: Any) -> Any:
        return [o("Mul", "p1", o("Identity", "i1", x), x), w]

    return tf.reduce_sum(o.loop(2, turn, x, w)[0] * w)


def of_an_invariant(o: Ops, x: Any, w: Any) -> Any:
    def turn(h: Any, w: Any) -> Any:
        same = o("Identity", "i1", x)
        return [tf.tanh(h * o("Mul", "p1", same, same)), w]

    return tf.reduce_sum(o.loop(2, turn, w, w)[0])


def in_a_call(o: Ops, x: Any, w: Any) -> Any:
    def product(a: Any, b: Any) -> Any:
        return o("Mul", "p1", a, b) * a

    return tf.reduce_sum(o.call(product, o("Identity", "i1", x), x) * w)


def in_a_branch(o: Ops, x: Any, w: Any) -> Any:
    same = o("Identity", "i1", x)
    y = o.choose(tf.reduce_sum(w) < 1e9, lambda: o("Mul", "p1", same, x), lambda: o("Neg", "n1", x))
    return tf.reduce_sum(y * w)


def in_a_custom_gradient(o: Ops, x: Any, w: Any) -> Any:
    return tf.reduce_sum(custom(o, x) * w)


EDITS = [
    Edit("i1", "before", wave, 0),
    Edit("i1", "after", wave, 0),
    Edit("i1", "after", wave, 0, autodiff=True),
    Edit("i1", "grad_in", wave, 0),
    Edit("p1", "before", wave, 0),
    Edit("p1", "before", wave, 1),
    Edit("t1", "grad_in", wave, 0),
]
PROGRAMS = [
    in_one_op,
    in_one_op_of_a_loop,
    of_an_invariant,
    in_a_call,
    in_a_branch,
    in_a_custom_gradient,
]


@pytest.mark.slow
@pytest.mark.parametrize("way", SOME)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_each_is_read_as_it_was_edited(program: Any, way: str) -> None:
    changed = 0
    for edit in EDITS:
        try:
            check(program, [X, W], [edit], way)
            changed += 1
        except Unchanged:  # No op has that name.
            pass
    assert changed >= 3


def branch_of_a_loop(o: Ops, x: Any, w: Any) -> Any:
    def turn(x: Any, w: Any) -> Any:
        return [tf.tanh(in_a_branch(o, x, w) * x), w]

    return tf.reduce_sum(o.loop(2, turn, x, w)[0])


def custom_gradient_in_a_loop(o: Ops, x: Any, w: Any) -> Any:
    return tf.reduce_sum(o.loop(2, lambda x, w: [custom(o, x), w], x, w)[0])


@pytest.mark.parametrize("way", SOME[:2])
@pytest.mark.parametrize("program", [branch_of_a_loop, custom_gradient_in_a_loop])
def test_in_loops_some_are_refused(program: Any, way: str) -> None:
    check(
        program,
        [X, W],
        [Edit("t1" if "custom" in program.__name__ else "p1", "grad_out", wave)],
        way,
    )
    with pytest.raises(UnsupportedError, match="and an Identity of it"):
        check(program, [X, W], [Edit("i1", "after", wave, 0)], way)
