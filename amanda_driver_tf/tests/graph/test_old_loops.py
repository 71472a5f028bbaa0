"""Loops of TensorFlow 1 and their gradients: nested, with branches, of any number of turns.

The twin, with the edits written in, is the loop unrolled in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda import OpContext, Tool
from amanda_core.errors import UnsupportedError
from amanda_core.testing.tools import Edit, before, editing, tool

from .making import (
    Ops,
    arrays,
    assert_same_graph,
    build,
    check,
    close,
    counting,
    double,
    equal,
    new_session,
    results,
    serialised,
    staged,
    v1,
)


@pytest.fixture(autouse=True)
def _old_control_flow() -> Iterator[None]:
    was = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    yield
    if was:
        v1.enable_control_flow_v2()


def shifted(value: Any) -> Any:
    return value * 0.5 + 0.25


MASK = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 0]], np.float32)


CAPTURED = tf.constant(MASK)


def masked(value: Any) -> Any:
    return value * CAPTURED if tf.executing_eagerly() else value * MASK


def loop(
    ops: Ops, times: int, step: Callable[[int, Any], Any], h: Any, **how: Any
) -> Any:
    """``times: h = step(turn, h)``; in the twin unrolled."""
    if ops.edits is None:
        return v1.while_loop(
            lambda i, _: i < times,
            lambda i, h: (i + 1, step(i, h)),
            (tf.constant(0), h),
            **how,
        )[1]
    for turn in range(times):
        h = step(turn, h)
    return h


def recurrent(times: int = 3, **how: Any) -> Callable[..., Any]:
    """Every op's gradient reads what the forward op read or made; `h` has several readers."""

    def program(ops: Ops, x: Any, w: Any) -> Any:
        def step(turn: Any, h: Any) -> Any:
            g = ops("Sigmoid", "gate", ops("MatMul", "inner", h, w))
            mixed = ops("Mul", "mixed", g, ops("Sin", "sin", h))
            scaled = ops("Mul", "scaled", mixed, tf.constant(1.5))
            return ops("AddV2", "sum", scaled, ops("Square", "square", g))

        return ops("Sum", "loss", ops("Square", "last", loop(ops, times, step, x, **how)))

    return program


VALUES = [value * 0.5 for value in arrays((3, 3), (3, 3))]

EDITS = [
    *(Edit("inner", "before", masked, position) for position in (0, 1)),
    Edit("gate", "before", shifted, 0),
    Edit("gate", "after", shifted, 0),
    *(Edit("mixed", "before", shifted, position) for position in (0, 1)),
    Edit("mixed", "after", masked, 0),
    Edit("scaled", "before", shifted, 1),
    Edit("square", "before", shifted, 0),
    Edit("sum", "after", shifted, 0),
    *(Edit("inner", "grad_in", masked, position) for position in (0, 1)),
    Edit("gate", "grad_out", shifted, 0),
    Edit("sum", "grad_in", shifted, 1),
    Edit("sum", "grad_out", shifted, 0),
    Edit("mixed", "replace", tf.maximum),
    Edit("inner", "replace", lambda a, b: tf.matmul(a, b) * 0.5),
    Edit("gate", "backward", double),
    Edit("mixed", "before", tf.sin, 0, True),
    Edit("inner", "before", tf.sin, 1, True),
    Edit("gate", "after", tf.square, 0, True),
]


def named(edit: Edit) -> str:
    return f"{edit.name}-{edit.kind}-{edit.position}-{edit.autodiff}"


@pytest.mark.parametrize("edit", EDITS, ids=named)
def test_one_edit(edit: Edit) -> None:
    check(recurrent(), VALUES, [edit])


@pytest.mark.parametrize("edit", EDITS, ids=named)
def test_one_edit_staged(edit: Edit) -> None:
    routine = staged(edit.routine)
    check(recurrent(), VALUES, [edit._replace(routine=routine)])


@pytest.mark.parametrize("kind", ["placeholder", "resource", "reference"])
def test_all_edits_together(kind: str) -> None:
    check(recurrent(), VALUES, EDITS[:15], kind)


@pytest.mark.parametrize("times", [1, 7])
@pytest.mark.parametrize(
    "how",
    [{}, {"parallel_iterations": 1}, {"swap_memory": True}, {"maximum_iterations": 20}],
    ids=str,
)
def test_numbers_of_turns_and_ways_to_run_them(times: int, how: dict[str, Any]) -> None:
    check(recurrent(times, **how), VALUES, [EDITS[1], EDITS[4], EDITS[12]])


def test_no_turn_at_all() -> None:
    calls: list[int] = []

    def counted(value: Any) -> Any:
        calls.append(1)
        return value * 2.0

    built = build(recurrent(0), VALUES)
    edits = [
        Edit("inner", "before", counted, 1),
        Edit("mixed", "after", counted, 0),
        Edit("inner", "grad_in", counted, 1),
        Edit("inner", "replace", lambda a, b: counted(a)),
    ]
    with new_session(built.graph) as session:
        plain = results(session, built)
        with amanda.apply(editing(*edits)):
            equal(results(session, built), plain)
    assert not calls


@pytest.mark.parametrize(
    ("name", "kind", "position"),
    [("inner", "before", 1), ("inner", "after", 0), ("inner", "grad_in", 1), ("gate", "backward", 0)],
)
def test_a_routine_runs_once_a_turn(name: str, kind: str, position: int) -> None:
    """Also where it reads nothing but what is the same in all turns."""
    calls: list[int] = []

    def counted(value: Any) -> Any:
        calls.append(1)
        return value * 2.0

    built = build(recurrent(3), VALUES)
    tools = editing(Edit(name, kind, counted, position))
    with new_session(built.graph) as session, amanda.apply(tools):
        results(session, built)
    assert len(calls) == 3


def test_a_replacement_that_reads_invariants_runs_once_a_turn() -> None:
    calls: list[int] = []

    def counted(value: Any) -> Any:
        calls.append(1)
        return tf.cos(value)

    graph = tf.Graph()
    with graph.as_default():
        w = tf.constant(VALUES[1])
        _, h = v1.while_loop(
            lambda i, _: i < 3, lambda i, h: (i + 1, h * tf.sin(w, name="sin")), [0, w]
        )
    with new_session(graph) as session:
        with amanda.apply(editing(Edit("sin", "replace", counted))):
            found = session.run(h)
    close(found, VALUES[1] * np.cos(VALUES[1]) ** 3)
    assert len(calls) == 3


def everything(routine: Callable[..., Any]) -> Tool:
    """A routine at every point of every op."""

    def visit(context: OpContext) -> None:
        if context.is_forward():
            context.insert_before_op(routine)
            context.insert_after_op(routine)
            context.insert_before_backward_op(routine)
            context.insert_after_backward_op(routine)

    made = Tool()
    made.add_inst_for_op(visit)
    return made


def raw(routine: Callable[..., Any]) -> Tool:
    """A routine at every point of every backward op."""

    def visit(context: OpContext) -> None:
        context.insert_before_backward_op(routine)
        context.insert_after_backward_op(routine)

    made = Tool()
    made.add_inst_for_op(visit, backward=True)
    return made


def nothing(*values: Any) -> None:
    return None


def same(*values: Any) -> Any:
    return list(values)


def copies(*values: Any) -> Any:
    return [value if value is None else tf.identity(value) for value in values]


# Programs with more than one level.


def nested(ops: Ops, x: Any, w: Any) -> Any:
    def inner(turn: Any, h: Any) -> Any:
        return ops("Tanh", "act", ops("MatMul", "inner", h, w))

    def outer(turn: Any, h: Any) -> Any:
        mixed = ops("Mul", "mixed", ops("Sin", "sin", h), w)
        return ops("Mul", "out", loop(ops, 2, inner, mixed), h)

    return ops("Sum", "loss", ops("Square", "last", loop(ops, 3, outer, x)))


def three_deep(ops: Ops, x: Any, w: Any) -> Any:
    def third(turn: Any, h: Any) -> Any:
        return ops("Sin", "act", ops("Mul", "inner", h, w))

    def second(turn: Any, h: Any) -> Any:
        return ops("Mul", "mixed", loop(ops, 2, third, h), h)

    def first(turn: Any, h: Any) -> Any:
        return ops("Sin", "sin", loop(ops, 2, second, h))

    return ops("Sum", "loss", ops("Square", "last", loop(ops, 2, first, x)))


def branch_in_loop(ops: Ops, x: Any, w: Any) -> Any:
    def step(turn: Any, h: Any) -> Any:
        return v1.cond(
            tf.equal(turn % 2, 0),
            lambda: ops("Tanh", "act", ops("MatMul", "inner", h, w)),
            lambda: ops("Mul", "mixed", ops("Sin", "sin", h), w),
        )

    return ops("Sum", "loss", ops("Square", "last", loop(ops, 4, step, x)))


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
        def step(turn: Any, h: Any) -> Any:
            return ops("Tanh", "act", ops("MatMul", "inner", h, w))

        taken = v1.cond(
            tf.equal(tf.reduce_sum(x) > -1e6, flag),
            lambda: ops("Mul", "mixed", loop(ops, 3, step, x), w),
            lambda: ops("Sin", "sin", x),
        )
        return ops("Sum", "loss", ops("Square", "last", taken))

    return program


def loop_in_branch_in_loop(ops: Ops, x: Any, w: Any) -> Any:
    def inner(turn: Any, h: Any) -> Any:
        return ops("Tanh", "act", ops("MatMul", "inner", h, w))

    def outer(turn: Any, h: Any) -> Any:
        return v1.cond(
            tf.equal(turn % 2, 0),
            lambda: ops("Mul", "mixed", loop(ops, 2, inner, h), h),
            lambda: ops("Sin", "sin", h),
        )

    return ops("Sum", "loss", ops("Square", "last", loop(ops, 4, outer, x)))


PROGRAMS = {
    "plain": recurrent(),
    "nested": nested,
    "three_deep": three_deep,
    "branch_in_loop": branch_in_loop,
    "branch_by_value": branch_by_value,
    "branches_in_branches": branches_in_branches,
    "loop_in_branch": loop_in_branch(True),
    "loop_in_branch_not_taken": loop_in_branch(False),
    "loop_in_branch_in_loop": loop_in_branch_in_loop,
}


@pytest.mark.parametrize("routine", [nothing, same, copies])
@pytest.mark.parametrize("name", PROGRAMS)
def test_identities_everywhere_change_no_bit(name: str, routine: Callable[..., Any]) -> None:
    built = build(PROGRAMS[name], VALUES)
    with new_session(built.graph) as session:
        plain = results(session, built)
        for tools in ([everything(routine)], [raw(routine)], [everything(routine), raw(routine)]):
            with amanda.apply(*tools):
                equal(results(session, built), plain)
        equal(results(session, built), plain)


WITHIN = [
    Edit("inner", "before", masked, 1),
    Edit("inner", "before", shifted, 0),
    Edit("act", "before", shifted, 0),
    Edit("act", "after", masked, 0),
    Edit("mixed", "before", shifted, 0),
    Edit("sin", "before", shifted, 0),
    Edit("inner", "grad_in", shifted, 1),
    Edit("act", "grad_out", shifted, 0),
    Edit("sin", "grad_in", masked, 0),
    Edit("act", "backward", lambda *g: g[0] * 3.0),
    Edit("mixed", "after", tf.sin, 0, True),
    Edit("inner", "before", tf.sin, 0, True),
    Edit("sin", "replace", tf.nn.softplus),
]


@pytest.mark.parametrize("staging", [False, True], ids=["host", "staged"])
@pytest.mark.parametrize("edit", WITHIN, ids=named)
@pytest.mark.parametrize(
    "name", ["nested", "three_deep", "branch_in_loop", "branch_by_value", "branches_in_branches",
     "loop_in_branch", "loop_in_branch_in_loop"]
)
def test_edits_within(name: str, edit: Edit, staging: bool) -> None:
    if edit.name == "sin" and name == "loop_in_branch":
        pytest.skip("the op is in the branch that does not run")
    if edit.kind == "backward" and name == "branch_by_value":
        pytest.skip("the op has two gradients there")
    if staging:
        edit = edit._replace(routine=staged(edit.routine))
    check(PROGRAMS[name], VALUES, [edit])


@pytest.mark.parametrize("name", PROGRAMS)
def test_several_edits_within(name: str) -> None:
    check(PROGRAMS[name], VALUES, [e for e in WITHIN if e.kind != "replace" and e.kind != "backward"])
