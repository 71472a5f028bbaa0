"""Loops of TensorFlow 1 and their gradients under tools; the reference is the unrolled loop.

Edits of gradients apply there, and edits in loops that are not differentiated. Other edits are
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda import OpContext, Tool
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import Edit, before, editing, tool

from ..comparison import close, equal
from .loop_programs import VALUES, captured, loop, masked, named, recurrent, shifted
from .reference_programs import (
    Ops,
    analysing,
    build,
    check,
    check_refused,
    double,
    new_session,
    results,
    staged,
    v1,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("old_control_flow")]


GRADIENTS = [
    *(Edit("inner", "grad_in", masked, position) for position in (0, 1)),
    Edit("sum", "grad_in", shifted, 1),
    Edit("sum", "grad_out", shifted, 0),
    Edit("gate", "backward", double),
]
REFUSED = [
    *(Edit("inner", "before", masked, position) for position in (0, 1)),
    Edit("gate", "before", shifted, 0),
    Edit("gate", "after", shifted, 0),
    Edit("mixed", "before", shifted, 1),
    Edit("square", "before", shifted, 0),
    Edit("sum", "after", shifted, 0),
    Edit("mixed", "replace", tf.maximum),
    Edit("mixed", "before", tf.sin, 0, True),
    Edit("gate", "after", tf.square, 0, True),
]
WHY = "computed in a loop or branch of TensorFlow 1"


@pytest.mark.parametrize("edit", GRADIENTS, ids=named)
def test_one_edit_of_a_gradient(edit: Edit) -> None:
    check(recurrent(), VALUES, [edit])


@pytest.mark.parametrize("edit", REFUSED, ids=named)
def test_other_edits_are_refused(edit: Edit) -> None:
    check_refused(recurrent(), VALUES, edit, WHY)


@pytest.mark.parametrize("edit", [REFUSED[2], REFUSED[3], REFUSED[8]], ids=named)
def test_staged_ones_are_refused(edit: Edit) -> None:
    check_refused(recurrent(), VALUES, edit, WHY, staging=True)


def test_what_is_refused_in_a_loop_leaves_edits_beside_it() -> None:
    """A routine at every op returns a value only outside of the loop."""

    def analyse(context: OpContext) -> None:
        inside = context.name.startswith("while")
        context.insert_before_op(lambda *values: None)
        if context.op_type == "Square" and not inside:
            context.insert_before_op(shifted, inputs=[0])

    check(recurrent(), VALUES, [Edit("last", "before", shifted, 0)], tools=[tool(analyse)])


def test_limits_are_listed() -> None:
    with amanda.apply(Tool()) as handle:
        assert any("TensorFlow 1" in gap.what for gap in handle.coverage()["tensorflow"])


def test_one_staged_edit() -> None:
    edit = Edit("inner", "grad_in", masked, 1)
    check(recurrent(), VALUES, [edit], tools=[editing(edit._replace(routine=staged(captured)))])


@pytest.mark.parametrize("kind", ["placeholder", "resource", "reference"])
def test_many_edits_together(kind: str) -> None:
    check(recurrent(), VALUES, GRADIENTS, kind)


@pytest.mark.parametrize(
    ("times", "how"),
    [
        (1, {}),
        (12, {"parallel_iterations": 1}),
        (12, {"parallel_iterations": 32, "swap_memory": True}),
        (4, {"maximum_iterations": 20}),
    ],
    ids=str,
)
def test_numbers_of_turns_and_ways_to_run_them(times: int, how: dict[str, Any]) -> None:
    check(recurrent(times, **how), VALUES, [GRADIENTS[1], GRADIENTS[3]])


def test_no_turn_at_all() -> None:
    calls: list[int] = []

    def counted(value: Any, *others: Any) -> Any:
        calls.append(1)
        return value * 2.0

    built = build(recurrent(0), VALUES)
    edits = [
        Edit("inner", "before", counted, 1),
        Edit("mixed", "after", counted, 0),
        Edit("inner", "grad_in", counted, 1),
    ]
    with new_session(built.graph) as session:
        plain = results(session, built)
        with amanda.apply(editing(*edits)):
            equal(results(session, built), plain)
    assert not calls


@pytest.mark.parametrize(
    ("name", "kind", "position"),
    [
        ("inner", "before", 1),
        ("inner", "after", 0),
        ("inner", "grad_in", 1),
        ("gate", "backward", 0),
    ],
)
def test_a_routine_runs_once_a_turn(name: str, kind: str, position: int) -> None:
    """This also holds if it reads only loop invariants."""
    calls: list[int] = []

    def counted(value: Any) -> Any:
        calls.append(1)
        return None if kind in ("before", "after") else value * 2.0

    built = build(recurrent(3), VALUES)
    tools = editing(Edit(name, kind, counted, position))
    with new_session(built.graph) as session, amanda.apply(tools):
        results(session, built)
    assert len(calls) == 3


def test_what_reads_invariants_only_runs_once_a_turn() -> None:
    calls: list[str] = []

    def counted(name: str) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            calls.append(name)
            return tf.cos(value)

        return run

    graph = tf.Graph()
    with graph.as_default():
        w = tf.constant(VALUES[1])

        def step(i: Any, h: Any) -> Any:
            value = h * tf.sin(w, name="sin")
            branch = v1.cond(i < 2, lambda: tf.exp(w, name="exp") + h * 0.0, lambda: h * 0.0)
            return i + 1, value + 0.0 * branch

        _, h = v1.while_loop(lambda i, _: i < 3, step, (0, w))
    edits = [Edit("sin", "replace", counted("sin")), Edit("exp", "before", counted("exp"), 0)]
    with new_session(graph) as session, amanda.apply(editing(*edits)):
        close(session.run(h), VALUES[1] * np.cos(VALUES[1]) ** 3)
    assert sorted(calls) == ["exp"] * 2 + ["sin"] * 3


@pytest.mark.parametrize("staging", [False, True], ids=["host", "staged"])
def test_a_routine_behind_what_returns_nothing(staging: bool) -> None:
    calls: list[int] = []

    def routine() -> None:
        tf.py_function(lambda: calls.append(1), [], [])

    graph = tf.Graph()
    with graph.as_default():
        count = v1.get_variable("count", initializer=0, use_resource=True)

        def step(i: Any) -> Any:
            with tf.control_dependencies([count.assign_add(2, read_value=False)]):
                return i + 1

        looped = v1.while_loop(lambda i: i < 3, step, [tf.constant(0)])
    tools = tool(
        lambda context: context.insert_after_op(
            amanda.staged(routine) if staging else lambda: calls.append(1)
        ),
        "AssignAddVariableOp",
    )
    with new_session(graph) as session:
        session.run(count.initializer)
        with amanda.apply(tools):
            assert session.run(looped) == 3
        assert session.run(count) == 6
    assert len(calls) == 3


@pytest.mark.parametrize("staging", [False, True], ids=["host", "staged"])
def test_two_invariants_of_one_op(staging: bool) -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        flags = tf.greater(x, 0.0)

        def step(turn: Any, h: Any) -> Any:
            # Values that differ between iterations come last.
            return ops("SelectV2", "chosen", flags, w, ops("Sin", "act", h))

        # Not differentiated, so that values may be edited there.
        chosen = tf.stop_gradient(loop(ops, 3, step, x, back_prop=False))
        return tf.reduce_sum(chosen) + ops("Sum", "total", ops("Mul", "product", x, w))

    flip, move = tf.logical_not, shifted
    edits = [Edit("chosen", "before", flip, 0), Edit("chosen", "before", move, 1)]
    given = [edit._replace(routine=staged(edit.routine)) for edit in edits] if staging else edits
    check(program, VALUES, edits, tools=[editing(edit) for edit in given])


def test_a_loop_that_is_not_to_be_differentiated() -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        inner = recurrent(2, back_prop=False) if ops.edits is None else recurrent(2)
        stopped = inner(ops, x, w) if ops.edits is None else tf.stop_gradient(inner(ops, x, w))
        return stopped + ops("Sum", "total", ops("Mul", "product", x, w))

    for edit in (REFUSED[1], REFUSED[4], REFUSED[8]):
        check(program, VALUES, [edit])


def test_the_condition_is_edited() -> None:
    """It runs once more than the body, even if it reads a loop invariant."""
    calls: list[int] = []

    def one_more(limit: Any) -> Any:
        calls.append(1)
        return limit + 1

    graph = tf.Graph()
    with graph.as_default():
        x, limit = v1.placeholder(tf.float32, []), v1.placeholder(tf.int32, [])
        turns, h = v1.while_loop(
            lambda i, _: tf.less(i, limit, name="less"), lambda i, h: (i + 1, h * x), (0, x)
        )
        fetches = [turns, h, *v1.gradients(h, [x])]
    feed = {x: 2.0, limit: 3}
    with new_session(graph) as session:
        assert session.run(fetches, feed) == [3, 16.0, 32.0]
        with amanda.apply(before("less", one_more, 1)):
            assert session.run(fetches, feed) == [4, 32.0, 80.0]
    assert len(calls) == 5


@pytest.mark.parametrize("point", ["before", "after", "replace"])
def test_raw_edits_of_a_backward_op(point: str) -> None:
    changes: dict[str, Callable[..., Any]] = {
        "before": lambda y, g: g * (1 - y * y / 4),
        "after": lambda y, g: 3 * g * (1 - y * y),
        "replace": lambda y, g: y + g,
    }
    routines: dict[str, Callable[..., Any]] = {
        "before": lambda y, g: (y * 0.5, g),
        "after": lambda g: g * 3,
        "replace": changes["replace"],
    }

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def tanh(value: Any) -> Any:
        y = tf.tanh(value)
        return y, lambda g: changes[point](y, g)

    def program(ops: Ops, x: Any, w: Any) -> Any:
        act = tf.tanh if ops.edits is None else tanh

        def inner(turn: Any, h: Any) -> Any:
            return act(ops("MatMul", "inner", h, w))

        def outer(turn: Any, h: Any) -> Any:
            return v1.cond(tf.less(turn, 2), lambda: loop(ops, 2, inner, h), lambda: act(h))

        return ops("Sum", "loss", loop(ops, 3, outer, x))

    def analyse(context: OpContext) -> None:
        method = {"before": "insert_before", "after": "insert_after", "replace": "replace"}[point]
        getattr(context, f"{method}_backward_op")(routines[point])

    check(program, VALUES, [], tools=[tool(analyse, "TanhGrad", backward=True)])


@pytest.mark.parametrize(("name", "kind"), [("inner", "grad_in"), ("mixed", "grad_out")])
def test_a_routine_raises_in_a_turn(name: str, kind: str) -> None:
    turns: list[int] = []

    def failing(value: Any) -> Any:
        turns.append(1)
        if len(turns) == 2:
            raise KeyError("mine")
        return value * 2.0

    built = build(recurrent(4), VALUES)
    edit = Edit(name, kind, failing, 0)
    with new_session(built.graph) as session:
        plain = results(session, built)
        with amanda.apply(editing(edit)):
            with pytest.raises(KeyError, match="mine"):
                results(session, built)
            found = results(session, built)
        equal(results(session, built), plain)
    with new_session(built.graph) as session, amanda.apply(editing(edit._replace(routine=double))):
        equal(results(session, built), found)


# More than one reader, gradient, or position.


def test_one_tensor_at_two_positions() -> None:
    def squares(ops: Ops, x: Any) -> Any:
        return ops("Sum", "loss", loop(ops, 3, lambda _, h: ops("Mul", "twice", h, h), x))

    for position in (0, 1):
        check_refused(squares, VALUES[:1], Edit("twice", "before", shifted, position), WHY)
    check(squares, VALUES[:1], [Edit("twice", "grad_in", shifted, 1)])


def test_two_differentiations_of_one_loop() -> None:
    def both(edits: list[Edit] | None) -> Any:
        graph = tf.Graph()
        with graph.as_default():
            ops = Ops(edits)
            x, w = map(tf.constant, VALUES)
            h = loop(ops, 2, lambda _, h: ops("Sin", "act", ops("MatMul", "inner", h, w)), x)
            first, second = tf.reduce_sum(h), ops("Square", "square", h)
            return graph, [
                *v1.gradients(first, [x, w]),
                *v1.gradients(second, [x], grad_ys=[tf.ones_like(second) * 0.3]),
                *v1.gradients([first, second], [w]),
            ]

    for edit in (Edit("act", "backward", double), Edit("act", "grad_out", shifted, 0)):
        graph, fetches = both([edit])
        with new_session(graph) as session:
            wanted = session.run(fetches)
        graph, fetches = both(None)
        with new_session(graph) as session, amanda.apply(editing(edit)):
            close(session.run(fetches), wanted)
            # Only one of them, without the clones of the other run.
            close(session.run(fetches[2]), wanted[2])


def test_slices_as_gradients_of_an_invariant() -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        def step(turn: Any, h: Any) -> Any:
            rows = tf.gather(w, tf.stack([turn % 3, 0, 1]))
            return ops("Sin", "act", ops("MatMul", "inner", h, rows))

        return ops("Sum", "loss", loop(ops, 3, step, x))

    check(program, VALUES, [Edit("inner", "grad_in", shifted, 1)])


@pytest.mark.parametrize("how", ["foldl", "scan", "map_fn"])
def test_loops_over_rows(how: str) -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        def cell(h: Any, row: Any) -> Any:
            return ops("Sin", "act", ops("MatMul", "inner", h, w)) + row

        if how == "map_fn":
            rows = [cell(x, x[i]) for i in range(3)] if ops.edits is not None else None
            return tf.reduce_sum(tf.stack(rows) if rows else tf.map_fn(lambda r: cell(x, r), x))
        if ops.edits is None:
            made = (tf.foldl if how == "foldl" else tf.scan)(cell, x, initializer=x)
            return tf.reduce_sum(made)
        states = [x]
        for i in range(3):
            states.append(cell(states[-1], x[i]))
        return tf.reduce_sum(states[-1] if how == "foldl" else tf.stack(states[1:]))

    check(program, VALUES, [Edit("act", "grad_in", shifted, 0)])


def test_shapes_that_are_not_known() -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        x, w = (v1.placeholder_with_default(value, [None, None]) for value in (x, w))

        def step(turn: Any, h: Any) -> Any:
            return ops("Sin", "act", ops("AddV2", "inner", h, w))

        shapes = (tf.TensorShape([]), tf.TensorShape([None, None]))
        how = {} if ops.edits is not None else {"shape_invariants": shapes}
        return ops("Sum", "loss", loop(ops, 3, step, x, **how))

    check(program, VALUES, [Edit("inner", "grad_in", shifted, 1)])
    check_refused(program, VALUES, Edit("inner", "before", shifted, 1), WHY)


def test_functions_called_in_a_loop() -> None:
    def program(ops: Ops, x: Any, w: Any) -> Any:
        def cell(h: Any) -> Any:
            return ops("Sin", "act", ops("MatMul", "inner", h, w))

        called = tf.function(cell) if ops.edits is None else cell
        return ops("Sum", "loss", loop(ops, 3, lambda _, h: called(h), x))

    check(program, VALUES, [Edit("act", "grad_out", shifted, 0)])
    for edit in (
        Edit("inner", "before", shifted, 1),
        Edit("act", "before", shifted, 0),
        Edit("act", "before", tf.sin, 0, True),
    ):
        check_refused(program, VALUES, edit, WHY)


def test_training() -> None:
    edits = [Edit("inner", "grad_in", masked, 1)]

    def trained(written: list[Edit] | None) -> list[Any]:
        graph = tf.Graph()
        with graph.as_default():
            ops = Ops(written)
            w = v1.get_variable("w", initializer=VALUES[1])
            x = tf.constant(VALUES[0])
            h = loop(ops, 3, lambda _, h: ops("Sin", "act", ops("MatMul", "inner", h, w)), x)
            loss = tf.reduce_sum(h * h)
            step = v1.train.MomentumOptimizer(0.01, 0.9).minimize(loss)
            init = v1.global_variables_initializer()
        with new_session(graph) as session:
            session.run(init)
            with amanda.apply(editing(*edits) if written is None else Tool()):
                losses = [session.run([loss, step])[0] for _ in range(4)]
            return [*losses, session.run(w)]

    close(trained(None), trained(edits))


# What belongs to TensorFlow, and what was read from files.


def test_counters_of_gradients_are_no_operators() -> None:
    def visit(context: OpContext) -> None:
        names.add(context.name)
        if context.op_type in ("Sub", "GreaterEqual"):
            context.insert_after_op(lambda value: value)

    names: set[str] = set()
    built = build(recurrent(3), VALUES)
    with new_session(built.graph) as session:
        plain = results(session, built)
        with amanda.apply(analysing(visit)):
            equal(results(session, built), plain)
    assert {"while/add", "while/gate"} <= names
    assert not names & {"gradients/Add", "gradients/Sub", "gradients/GreaterEqual"}


def a_loop_in_a_file() -> Any:
    graph = tf.Graph()
    with graph.as_default():
        first = tf.exp(v1.placeholder(tf.float32, [3, 3], "x"), name="exp")
        w = tf.constant(VALUES[1])
        _, h = v1.while_loop(
            lambda i, _: i < 3,
            lambda i, h: (i + 1, tf.sin(tf.matmul(h, w, name="inner"), name="act")),
            (0, first),
        )
        tf.identity(h, name="out")
    return graph


@pytest.mark.parametrize("name", ["exp", "inner", "act"])
def test_a_loop_that_was_read_from_a_graph_def(name: str) -> None:
    """It has no control flow contexts."""
    read = tf.Graph()
    with read.as_default():
        tf.import_graph_def(a_loop_in_a_file().as_graph_def(), name="")
    h, w = np.exp(VALUES[0]), VALUES[1]
    h = shifted(h) if name == "exp" else h
    for _ in range(3):
        h = np.sin(h @ (shifted(w) if name == "inner" else w))
        h = shifted(h) if name == "act" else h
    edit = (
        before("inner", shifted, 1) if name == "inner" else editing(Edit(name, "after", shifted, 0))
    )
    with new_session(read) as session, amanda.apply(edit):
        close(session.run("out:0", {"x:0": VALUES[0]}), h.astype(np.float32))


@pytest.mark.parametrize(
    "edit",
    [
        Edit("inner", "before", shifted, 0),
        Edit("inner", "before", shifted, 1),
        Edit("inner", "before", captured, 1, True),
        Edit("act", "after", shifted, 0),
        Edit("act", "replace", tf.cos),
        Edit("act", "backward", shifted),
        Edit("act", "grad_out", shifted, 0),
        Edit("inner", "grad_in", shifted, 1),
    ],
    ids=named,
)
@pytest.mark.parametrize("whole", [True, False], ids=["meta graph", "graph def"])
def test_gradients_that_were_read_from_a_file_cannot_follow(whole: bool, edit: Edit) -> None:
    graph = a_loop_in_a_file()
    with graph.as_default():
        x = graph.get_tensor_by_name("x:0")
        (gradient,) = v1.gradients(graph.get_tensor_by_name("out:0"), [x])
        name = tf.identity(gradient, name="gradient").name
        saved = v1.train.export_meta_graph()
    read = tf.Graph()
    with read.as_default():
        if whole:
            v1.train.import_meta_graph(saved)
        else:
            tf.import_graph_def(saved.graph_def, name="")
    feed = {"x:0": VALUES[0]}
    with new_session(read) as session:
        plain = session.run(name, feed)
        with amanda.apply(before("inner", lambda value: None, 0)):
            equal(session.run(name, feed), plain)
        with (
            amanda.apply(editing(edit)),
            pytest.raises(UnsupportedError, match=r"read from a file|cannot follow") as caught,
        ):
            session.run(name, feed)
        for said in (f"op 'while/{edit.name}'", "by tool Tool(", "Import amanda before the graph"):
            assert said in str(caught.value)
        equal(session.run(name, feed), plain)
