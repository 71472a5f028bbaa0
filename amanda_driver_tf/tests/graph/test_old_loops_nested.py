"""Old loops in loops, branches in loops and loops in branches, differentiated where they stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import amanda
from amanda import Tool
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import Edit, Everywhere, editing

from ..comparison import close, equal
from .loop_programs import VALUES, loop, masked, named, recurrent, shifted
from .reference_programs import Ops, build, check, check_refused, new_session, results, v1

pytestmark = pytest.mark.usefixtures("old_control_flow")


def cell(ops: Ops, h: Any, w: Any) -> Any:
    return ops("Tanh", "act", ops("MatMul", "inner", h, w))


def nested(ops: Ops, x: Any, w: Any) -> Any:
    def outer(turn: Any, h: Any) -> Any:
        mixed = ops("Mul", "mixed", ops("Sin", "sin", h), w)
        return ops("Mul", "out", loop(ops, 2, lambda _, h: cell(ops, h, w), mixed), h)

    return ops("Sum", "loss", ops("Square", "last", loop(ops, 3, outer, x)))


def of_growing_length(ops: Ops, x: Any, w: Any) -> Any:
    def outer(turn: Any, h: Any) -> Any:
        return ops("Mul", "mixed", loop(ops, turn, lambda _, h: cell(ops, h, w), h), h)

    return ops("Sum", "loss", ops("Square", "last", loop(ops, 4, outer, x)))


def three_deep(ops: Ops, x: Any, w: Any) -> Any:
    def second(turn: Any, h: Any) -> Any:
        return ops("Mul", "mixed", loop(ops, 2, lambda _, h: cell(ops, h, w), h), h)

    def first(turn: Any, h: Any) -> Any:
        return ops("Sin", "sin", loop(ops, 2, second, h))

    return ops("Sum", "loss", ops("Square", "last", loop(ops, 2, first, x)))


def branch_by_value(ops: Ops, x: Any, w: Any) -> Any:
    def step(turn: Any, h: Any) -> Any:
        return v1.cond(
            tf.greater(h[0, 0], 0.0),
            lambda: ops("Sub", "act", ops("MatMul", "inner", h, w), tf.constant(0.3)),
            lambda: ops("Mul", "mixed", ops("Exp", "sin", h), w),
        )

    return ops("Sum", "loss", ops("Square", "last", loop(ops, 5, step, x)))


def branches_in_branches(ops: Ops, x: Any, w: Any) -> Any:
    def step(turn: Any, h: Any) -> Any:
        def deeper() -> Any:
            inner = ops("MatMul", "inner", h, w)
            return v1.cond(
                tf.less(turn, 2),
                lambda: ops("Tanh", "act", inner),
                lambda: ops("Mul", "mixed", inner, h),
            )

        return v1.cond(tf.equal(turn % 2, 0), deeper, lambda: ops("Sin", "sin", h))

    return ops("Sum", "loss", ops("Square", "last", loop(ops, 4, step, x)))


def loop_in_branch(flag: bool) -> Callable[..., Any]:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        taken = v1.cond(
            tf.equal(tf.reduce_sum(x) > -1e6, flag),
            lambda: ops("Mul", "mixed", loop(ops, 3, lambda _, h: cell(ops, h, w), x), w),
            lambda: ops("Sin", "sin", x),
        )
        return ops("Sum", "loss", ops("Square", "last", taken))

    return program


def loop_in_branch_in_loop(ops: Ops, x: Any, w: Any) -> Any:
    def outer(turn: Any, h: Any) -> Any:
        return v1.cond(
            tf.equal(turn % 2, 0),
            lambda: ops("Mul", "mixed", loop(ops, 2, lambda _, h: cell(ops, h, w), h), h),
            lambda: ops("Sin", "sin", h),
        )

    return ops("Sum", "loss", ops("Square", "last", loop(ops, 4, outer, x)))


PROGRAMS = {
    "flat": recurrent(),
    "nested": nested,
    "of_growing_length": of_growing_length,
    "three_deep": three_deep,
    "branch_by_value": branch_by_value,
    "branches_in_branches": branches_in_branches,
    "loop_in_branch": loop_in_branch(True),
    "loop_in_branch_not_taken": loop_in_branch(False),
    "loop_in_branch_in_loop": loop_in_branch_in_loop,
}

GRADIENTS = [
    Edit("inner", "grad_in", shifted, 1),
    Edit("act", "grad_out", shifted, 0),
    Edit("sin", "grad_in", masked, 0),
    Edit("act", "backward", lambda gradient: gradient * 3.0),
]
REFUSED = [
    Edit("inner", "before", masked, 1),
    Edit("act", "before", shifted, 0),
    Edit("mixed", "after", tf.sin, 0, True),
    Edit("sin", "replace", tf.nn.softplus),
]
WHY = "computed in a loop or branch of TensorFlow 1"


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_routines_everywhere_that_only_look_change_no_bit(name: str) -> None:
    built = build(PROGRAMS[name], VALUES)
    # The optimiser of 2.16 rounds one of them otherwise.
    with new_session(built.graph, optimised=False) as session:
        plain = results(session, built)
        for routine in (lambda *values: None, lambda *values: list(values)):
            with amanda.apply(Everywhere(routine)):
                equal(results(session, built), plain)
        equal(results(session, built), plain)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_many_edits_of_gradients_together(name: str) -> None:
    check(PROGRAMS[name], VALUES, GRADIENTS[:3])


@pytest.mark.slow
@pytest.mark.parametrize("edit", GRADIENTS, ids=named)
def test_one_edit_of_a_gradient(edit: Edit) -> None:
    check(loop_in_branch_in_loop, VALUES, [edit])


@pytest.mark.parametrize(
    "program",
    [branch_by_value, pytest.param(loop_in_branch_in_loop, marks=pytest.mark.slow)],
    ids=lambda program: program.__name__,
)
@pytest.mark.parametrize("edit", REFUSED, ids=named)
def test_other_edits_are_refused(edit: Edit, program: Callable[..., Any]) -> None:
    check_refused(program, VALUES, edit, WHY)


# Differentiated in another place than at the end.


def around(program: Callable[..., Any]) -> Callable[..., Any]:
    """Compute the gradient of a part of the program in each iteration of a loop."""

    def differentiating(ops: Ops, x: Any, w: Any) -> Any:
        def step(turn: Any, h: Any) -> Any:
            (gradient,) = v1.gradients(program(ops, h, w), [h])
            return ops("AddV2", "sum", h, gradient)

        return tf.reduce_sum(loop(ops, 3, step, x))

    return differentiating


def inside(program: Callable[..., Any], branch: bool) -> Callable[..., Any]:
    """Compute the gradient of values from outside in each iteration of a loop, or in a branch."""

    def differentiating(ops: Ops, x: Any, w: Any) -> Any:
        y = program(ops, x, w)

        def step(turn: Any, h: Any) -> Any:
            return ops("AddV2", "sum", h, v1.gradients(y, [x])[0])

        if branch:
            positive = tf.greater(tf.reduce_sum(x), -1e6)
            return tf.reduce_sum(v1.cond(positive, lambda: step(0, x), lambda: x * 1.0))
        return tf.reduce_sum(loop(ops, 2, step, x))

    return differentiating


def straight(ops: Ops, x: Any, w: Any) -> Any:
    return ops("Sum", "loss", ops("Square", "last", cell(ops, x, w)))


def looped(ops: Ops, x: Any, w: Any) -> Any:
    h = loop(ops, 2, lambda _, h: cell(ops, h, w), x)
    return ops("Sum", "loss", ops("Square", "last", h))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "with_refusals"),
    [
        (around(straight), False),
        (around(looped), True),
        (inside(straight, branch=False), True),
        (inside(straight, branch=True), True),
        (inside(looped, branch=True), True),
    ],
    ids=["body", "loop in a body", "from a body", "from a branch", "loop from a branch"],
)
def test_differentiated_within(program: Callable[..., Any], with_refusals: bool) -> None:
    def result(edits: list[Edit] | None, tools: Tool) -> Any:
        graph = tf.Graph()
        with graph.as_default():
            inputs = [v1.placeholder(tf.float32, [3, 3]) for _ in VALUES]
            fetch = program(Ops(edits), *inputs)
        with new_session(graph) as session, amanda.apply(tools):
            return session.run(fetch, dict(zip(inputs, VALUES, strict=True)))

    plain = result([], Tool())
    for edit in (
        Edit("inner", "before", shifted, 1),
        Edit("act", "before", shifted, 0),
        Edit("act", "before", tf.sin, 0, True),
        Edit("act", "grad_out", shifted, 0),
        Edit("act", "replace", tf.nn.softplus),
    ):
        wanted = result([edit], Tool())
        assert plain != wanted
        if with_refusals and edit.kind != "grad_out":
            with pytest.raises(UnsupportedError, match=WHY):
                result(None, editing(edit))
        else:
            close(result(None, editing(edit)), wanted)
