"""Ways to differentiate a program, and the comparison of it with its reference.

A way takes the program, its `Ops`, tensors, and whether to make functions of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import amanda
from amanda_core.testing.kit.tools import Edit, editing

from ..comparison import close, dense
from .reference_programs import Ops

v1 = tf.compat.v1

Program = Callable[..., Any]


def gradients_outside(
    program: Program, ops: Ops, values: Sequence[Any], function: bool
) -> list[Any]:
    """Return the program's result and gradients, by a tape around the function."""
    run: Any = lambda *given: program(ops, *given)  # noqa: E731
    if function:
        run = tf.function(run, autograph=False)
    with tf.GradientTape() as tape:
        tape.watch(values)
        result = run(*values)
    return [result, *tape.gradient(result, values)]


def gradients_inside(
    program: Program, ops: Ops, values: Sequence[Any], function: bool
) -> list[Any]:
    """Return the program's result and gradients, by a tape inside the function."""

    def run(*given: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(given)
            result = program(ops, *given)
        return [result, *tape.gradient(result, given)]

    return list((tf.function(run, autograph=False) if function else run)(*values))


def gradients_symbolic(
    program: Program, ops: Ops, values: Sequence[Any], function: bool
) -> list[Any]:
    """Return the program's result and gradients, by `tf.gradients` inside the function."""
    if not function:
        return gradients_inside(program, ops, values, False)

    def run(*given: Any) -> list[Any]:
        result = program(ops, *given)
        return [result, *tf.gradients(result, given)]

    return list(tf.function(run, autograph=False)(*values))


def gradients_twice(program: Program, ops: Ops, values: Sequence[Any], function: bool) -> list[Any]:
    """Return second derivatives, with one tape inside the function and one around it."""

    def run(*given: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(given)
            result = program(ops, *given)
        return [result, *tape.gradient(result, given)]

    chosen: Any = tf.function(run, autograph=False) if function else run
    with tf.GradientTape() as outer:
        outer.watch(values)
        first = chosen(*values)
        total = tf.add_n([tf.reduce_sum(tf.sin(g)) for g in first[1:] if g is not None])
    return [*first, *outer.gradient(total, values)]


def gradients_twice_inside(
    program: Program, ops: Ops, values: Sequence[Any], function: bool
) -> list[Any]:
    """Return second derivatives, with both tapes inside the function."""

    def run(*given: Any) -> Any:
        return gradients_twice(program, ops, given, False)

    return list((tf.function(run, autograph=False) if function else run)(*values))


def gradients_twice_outside(
    program: Program, ops: Ops, values: Sequence[Any], function: bool
) -> list[Any]:
    """Return second derivatives, with both tapes around the function."""
    run: Any = lambda *given: program(ops, *given)  # noqa: E731
    if function:
        run = tf.function(run, autograph=False)
    with tf.GradientTape() as outer:
        outer.watch(values)
        with tf.GradientTape() as tape:
            tape.watch(values)
            result = run(*values)
        first = tape.gradient(result, values)
        total = tf.add_n([tf.reduce_sum(tf.sin(g)) for g in first if g is not None])
    return [result, *first, *outer.gradient(total, values)]


def gradients_in_session(
    program: Program, ops: Ops, values: Sequence[Any], function: bool
) -> list[Any]:
    """Return the program's result and its gradients, by `tf.gradients` in a session's graph."""
    if not function:
        return gradients_inside(program, ops, values, False)
    arrays = [dense(value) for value in values]
    with tf.Graph().as_default():
        fed = [v1.placeholder(value.dtype, value.shape) for value in values]
        result = program(ops, *fed)
        wanted = [result, *v1.gradients(result, fed)]
        with v1.Session() as session:
            there = [tensor for tensor in wanted if tensor is not None]
            found = iter(session.run(there, dict(zip(fed, arrays, strict=True))))
    return [None if tensor is None else tf.constant(next(found)) for tensor in wanted]


#: Ways to differentiate a program in sessions.
IN_SESSIONS = {"session": gradients_in_session}

#: Ways to differentiate a program twice.
TWICE = {
    "inside and outside": gradients_twice,
    "twice inside": gradients_twice_inside,
    "twice outside": gradients_twice_outside,
}

#: Ways to differentiate a program.
WAYS = {
    "outside": gradients_outside,
    "inside": gradients_inside,
    "tf.gradients": gradients_symbolic,
}


#: Without any function.
EAGER = {
    "eager": lambda program, ops, values, function: gradients_inside(program, ops, values, False)
}


class Unchanged(Exception):
    """Raised if edits change nothing, so that a comparison would test nothing."""


def check(program: Program, values: Sequence[Any], edits: Sequence[Edit], way: str) -> list[Any]:
    """Compare a program under a tool with the reference program that has the edits written in.

    Also check that the edits change the result, and that nothing stays after the tools are removed.
    """
    tensors = [tf.convert_to_tensor(value) for value in values]
    differentiate = {**EAGER, **WAYS, **IN_SESSIONS, **TWICE}[way]
    wanted = differentiate(program, Ops(edits), tensors, False)
    with amanda.apply(editing(*edits)):
        found = differentiate(program, Ops(), tensors, True)
    close([_zeros(w, f) for f, w in zip(found, wanted, strict=True)], wanted)
    plain = differentiate(program, Ops([]), tensors, False)
    if not _differ(plain, wanted):
        raise Unchanged
    return found


def _zeros(wanted: Any, found: Any) -> Any:
    # Loops and branches give zeros where Python's, in the reference, have no gradient.
    return None if wanted is None and found is not None and not dense(found).any() else found


def _differ(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return any(
        (a is None) != (b is None) or (a is not None and not np.array_equal(dense(a), dense(b)))
        for a, b in zip(these, those, strict=True)
    )
