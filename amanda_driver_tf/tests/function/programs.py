"""Programs in which edits can go wrong: values used twice; calls, loops and branches nested.

Each takes `Ops` and three tensors, and returns a scalar. The names of ops tell edits where to go.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from .reference_programs import Ops

__all__ = ["OPS", "PROGRAMS"]


def straight_line(o: Ops, x: Any, w: Any, v: Any) -> Any:
    h = o("Tanh", "t1", o("MatMul", "m1", x, w))
    h = o("AddV2", "a1", h, x)
    h = o("Mul", "p1", h, x)
    return o("Sum", "s1", o("MatMul", "m2", h, v))


def shared_values(o: Ops, x: Any, w: Any, v: Any) -> Any:
    """Use values edited for one op in other ops and their gradients."""
    h = o("MatMul", "m1", x, w)
    k = o("Mul", "p1", o("MatMul", "m2", h, w), h)
    return o("Sum", "s1", o("Mul", "q1", o("Tanh", "t1", k), h))


def same_twice(o: Ops, x: Any, w: Any, v: Any) -> Any:
    h = o("MatMul", "m1", x, w)
    h = o("AddV2", "a1", o("Mul", "p1", h, h), h)
    return o("Sum", "s1", o("AddV2", "a2", h, h))


def passed_through(o: Ops, x: Any, w: Any, v: Any) -> Any:
    """Use one tensor as the gradient of several values, and sums of gradients by broadcasting."""
    h = o("AddV2", "a1", o("MatMul", "m1", x, w), x[0])
    h = o("Mul", "p1", h, tf.reduce_sum(v))
    h = o("Sub", "d1", o("Identity", "i1", h), o("Exp", "e1", x))
    h = o("AddV2", "a2", h, o("Identity", "i2", h))
    return o("Sum", "s1", h)


def calls(o: Ops, x: Any, w: Any, v: Any) -> Any:
    """Call functions on three levels, each from several places."""

    def linear(x: Any, w: Any) -> Any:
        return o("MatMul", "m1", x, w)

    def block(x: Any, w: Any, v: Any) -> Any:
        return o("Tanh", "t1", o.call(linear, o.call(linear, x, w), v))

    y = o.call(block, x, w, v)
    return o("Sum", "s1", o("Mul", "p1", y, o.call(block, y, v, w)))


def several_results(o: Ops, x: Any, w: Any, v: Any) -> Any:
    def one(x: Any, w: Any) -> Any:
        h = o("MatMul", "m1", x, w)
        return h, o("Mul", "p1", h, x)

    def two(x: Any, w: Any) -> Any:
        h, k = o.call(one, x, w)
        return o("Tanh", "t1", h), o("AddV2", "a1", k, h)

    def three(x: Any, w: Any, v: Any) -> Any:
        p, q = o.call(two, x, w)
        r, s = o.call(two, q, v)
        return o("Mul", "q1", p, r) + s

    return o("Sum", "s1", o.call(three, x, w, v))


def loop(o: Ops, x: Any, w: Any, v: Any) -> Any:
    def body(x: Any, u: Any) -> Any:
        return [o("Tanh", "t1", o("MatMul", "m1", x, w)), o("Mul", "p1", u, w)]

    a, b = o.loop(3, body, x, v)
    return o("Sum", "s1", o("MatMul", "m2", a, b))


def varying_loop(o: Ops, x: Any, w: Any, v: Any) -> Any:
    def body(x: Any, u: Any) -> Any:
        return [o("Tanh", "t1", o("MatMul", "m1", x, u)), o("AddV2", "a1", u, w)]

    a, b = o.loop(3, body, x, v, maximum_iterations=5)
    return o("Sum", "s1", o("Mul", "p1", a, a)) + tf.reduce_sum(b)


def loop_in_loop(o: Ops, x: Any, w: Any, v: Any) -> Any:
    def inner(x: Any) -> Any:
        return [o("Tanh", "t1", o("MatMul", "m1", x, w))]

    def body(x: Any, u: Any) -> Any:
        (y,) = o.loop(2, inner, x)
        return [o("Mul", "p1", y, x), o("AddV2", "a1", u, v)]

    a, b = o.loop(2, body, x, v)
    return o("Sum", "s1", o("MatMul", "m2", a, b))


def call_in_loop(o: Ops, x: Any, w: Any, v: Any) -> Any:
    def linear(x: Any, w: Any) -> Any:
        return o("MatMul", "m1", x, w)

    def body(x: Any, u: Any) -> Any:
        return [o("Tanh", "t1", o.call(linear, x, w)), o("Mul", "p1", u, v)]

    a, b = o.loop(3, body, x, v)
    return o("Sum", "s1", o.call(linear, a, b))


def loop_in_call(o: Ops, x: Any, w: Any, v: Any) -> Any:
    def many(x: Any, w: Any) -> Any:
        return o.loop(2, lambda x: [o("Tanh", "t1", o("MatMul", "m1", x, w))], x)[0]

    return o("Sum", "s1", o("Mul", "p1", o.call(many, x, w), o.call(many, x, v)))


def branch(o: Ops, x: Any, w: Any, v: Any) -> Any:
    y = o.choose(
        tf.reduce_sum(x) < 1e9,
        lambda: o("Tanh", "t1", o("MatMul", "m1", x, w)),
        lambda: o("MatMul", "m3", x, v),
    )
    return o("Sum", "s1", o("MatMul", "m2", y, v))


def branch_in_loop(o: Ops, x: Any, w: Any, v: Any) -> Any:
    def body(x: Any, u: Any) -> Any:
        y = o.choose(
            tf.reduce_sum(x) < 0.5,
            lambda: o("Tanh", "t1", o("MatMul", "m1", x, w)),
            lambda: o("Sigmoid", "g1", o("MatMul", "m2", x, u)),
        )
        return [y, o("Mul", "p1", u, w)]

    a, b = o.loop(4, body, x, v)
    return o("Sum", "s1", a) + tf.reduce_sum(b)


def loop_in_branch(o: Ops, x: Any, w: Any, v: Any) -> Any:
    def then() -> Any:
        return o.loop(2, lambda x: [o("Tanh", "t1", o("MatMul", "m1", x, w))], x)[0]

    y = o.choose(tf.reduce_sum(x) < 1e9, then, lambda: o("MatMul", "m3", x, v))
    return o("Sum", "s1", o("Mul", "p1", y, y))


def call_in_branch(o: Ops, x: Any, w: Any, v: Any) -> Any:
    def linear(x: Any, w: Any) -> Any:
        return o("Tanh", "t1", o("MatMul", "m1", x, w))

    y = o.choose(tf.reduce_sum(x) > 1e9, lambda: o.call(linear, x, w), lambda: o.call(linear, x, v))
    return o("Sum", "s1", o("MatMul", "m2", y, w))


#: Program -> the ops in it that edits can go to, with their number of inputs.
PROGRAMS: dict[Callable[..., Any], str] = {
    straight_line: "m1 t1 a1 p1 m2 s1",
    shared_values: "m1 m2 p1 t1 q1",
    same_twice: "m1 p1 a1 a2",
    passed_through: "m1 a1 p1 i1 e1 d1 i2 a2 s1",
    calls: "m1 t1 p1 s1",
    several_results: "m1 p1 t1 a1 q1",
    loop: "m1 t1 p1 m2",
    varying_loop: "m1 t1 a1 p1",
    loop_in_loop: "m1 t1 p1 a1 m2",
    call_in_loop: "m1 t1 p1",
    loop_in_call: "m1 t1 p1",
    branch: "m1 t1 m2",
    branch_in_loop: "m1 t1 m2 g1 p1",
    loop_in_branch: "m1 t1 p1",
    call_in_branch: "m1 t1 m2",
}

#: First letter of an op's name -> its number of inputs that are differentiated.
OPS = {
    **dict.fromkeys("tgeisfn", 1),
    **dict.fromkeys("mpqadxbc", 2),
}
