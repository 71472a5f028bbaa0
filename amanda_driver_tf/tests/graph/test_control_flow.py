"""Loops and branches of graphs, those of functions and the old ones of switches and merges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import Edit, before, editing, tool

from ..comparison import close, equal
from .loop_programs import VALUES, control_flow, shifted
from .reference_programs import (
    Ops,
    arrays,
    build,
    check,
    check_refused,
    counting,
    double,
    new_session,
    results,
    staged,
    straight,
    v1,
)


@pytest.fixture(params=[True, False], ids=["new", "old"])
def new(request: pytest.FixtureRequest) -> Iterator[bool]:
    with control_flow(request.param):
        yield request.param


def looping(times: int = 3) -> Callable[..., Any]:
    """Repeat ``h = tanh(h @ w)``; in the reference program, by a Python loop."""

    def program(ops: Ops, x: Any, w: Any) -> Any:
        h = ops("Exp", "first", x)

        def step(h: Any) -> Any:
            return ops("Tanh", "act", ops("MatMul", "inner", h, w))

        if ops.edits is not None:
            for _ in range(times):
                h = step(h)
        else:
            _, h = v1.while_loop(
                lambda i, _: i < times, lambda i, h: (i + 1, step(h)), [tf.constant(0), h]
            )
        return ops("Sum", "loss", ops("Square", "last", h))

    return program


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit",
    [
        Edit("first", "before", shifted, 0),
        Edit("first", "after", shifted, 0),
        Edit("last", "before", shifted, 0),
        Edit("last", "after", shifted, 0),
        Edit("first", "grad_out", shifted, 0),
        Edit("first", "grad_in", double, 0),
        Edit("last", "grad_in", shifted, 0),
        Edit("first", "replace", tf.nn.softplus),
        Edit("last", "before", tf.sin, 0, True),
    ],
    ids=lambda e: f"{e.name}-{e.kind}",
)
def test_edits_around_a_differentiated_loop(new: bool, edit: Edit) -> None:
    check(looping(), VALUES, [edit])


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit",
    [
        Edit("inner", "before", shifted, 0),
        Edit("inner", "before", shifted, 1),
        Edit("inner", "after", shifted, 0),
        Edit("act", "before", double, 0),
        Edit("inner", "grad_out", shifted, 0),
        Edit("act", "grad_in", shifted, 0),
        Edit("act", "replace", tf.nn.softplus),
        Edit("act", "before", tf.sin, 0, True),
        Edit("inner", "after", tf.sin, 0, True),
    ],
    ids=lambda e: f"{e.name}-{e.kind}-{e.position}-{e.autodiff}",
)
def test_edits_in_a_differentiated_loop(new: bool, edit: Edit) -> None:
    if new or edit.kind.startswith("grad"):
        check(looping(), VALUES, [edit])
    else:
        check_refused(looping(), VALUES, edit, "in a loop or branch of TensorFlow 1")


@pytest.mark.parametrize(
    "edit",
    [
        Edit("inner", "grad_out", shifted, 0),
        Edit("inner", "grad_in", shifted, 1),
        Edit("inner", "grad_in", shifted, 0),
        Edit("act", "grad_in", double, 0),
        Edit("act", "backward", double),
    ],
    ids=lambda e: f"{e.name}-{e.kind}-{e.position}",
)
def test_edits_of_gradients_in_a_loop(new: bool, edit: Edit) -> None:
    check(looping(), VALUES, [edit])


def test_raw_edits_of_gradients_in_a_loop(new: bool) -> None:
    built = build(looping(), VALUES)
    seen: list[str] = []

    def analyse(context: amanda.OpContext) -> None:
        name = context.name
        # Beside it there are the ops that bring values from the loop to its gradient.
        if context.op_type == "TanhGrad":
            assert context.forward is not None
            assert context.forward.op_type == "Tanh"
            context.insert_after_backward_op(lambda g: seen.append(name))
            context.insert_after_backward_op(lambda g: g * 0.0)

    made = tool(analyse, backward=True)
    with new_session(built.graph) as session:
        plain = results(session, built)
        with amanda.apply(made):
            found = results(session, built)
    assert len(seen) == 3
    equal(found[0], plain[0])
    # The first product's gradient comes after a tanh, like that of each later one.
    close(found[1:], [np.zeros((3, 3), np.float32)] * 2)


def test_an_old_loop_is_watched(new: bool) -> None:
    built = build(looping(), VALUES)
    with new_session(built.graph) as session:
        plain = results(session, built)
        seen, watching = counting()
        with amanda.apply(watching):
            equal(results(session, built), plain)
    names = [name.rpartition("/")[2] for name in seen]
    assert names.count("inner") == 3
    assert names.count("act") == 3
    assert names.count("first") == names.count("last") == names.count("loss") == 1


@pytest.mark.parametrize(
    "edit",
    [
        Edit("inner", "before", shifted, 1),
        Edit("inner", "after", shifted, 0),
        Edit("act", "replace", tf.nn.softplus),
        Edit("act", "before", staged(shifted), 0),
        Edit("first", "after", shifted, 0),
    ],
    ids=lambda e: f"{e.name}-{e.kind}",
)
def test_edits_in_a_loop_that_is_not_differentiated(new: bool, edit: Edit) -> None:
    def graph_of(edits: list[Edit] | None) -> tuple[Any, Any]:
        graph = tf.Graph()
        with graph.as_default():
            result = looping()(Ops(edits), *map(tf.constant, VALUES))
        return graph, result

    graph, result = graph_of([edit])
    with new_session(graph) as session:
        wanted = session.run(result)
    graph, result = graph_of(None)
    with new_session(graph) as session:
        plain = session.run(result)
        with amanda.apply(editing(edit)):
            close(session.run(result), wanted)
            close(session.run(result), wanted)
        equal(session.run(result), plain)


@pytest.mark.parametrize("compare", [tf.less, tf.greater], ids=["less", "greater"])
def test_the_condition_of_a_loop_is_watched(new: bool, compare: Any) -> None:
    """TensorFlow's loop optimizer reads it, and crashes on outputs other than the first."""
    graph = tf.Graph()
    with graph.as_default():
        sign = 1 if compare is tf.less else -1
        start = [tf.constant(0), tf.constant([0.1, 0.2])]
        _, h = tf.while_loop(
            lambda i, _: compare(i, 3 * sign), lambda i, h: (i + sign, tf.sin(h)), start
        )
    name = "Less" if compare is tf.less else "Greater"
    with new_session(graph) as session:
        plain = session.run(h)
        seen, watching = counting(name)
        with amanda.apply(watching, before(name, lambda i, limit: None)):
            equal(session.run(h), plain)
        with amanda.apply(before(name, lambda i, limit: (i, limit - sign))):
            close(session.run(h), np.sin(np.sin(np.array([0.1, 0.2], np.float32))))
    assert len(seen) == 4


def test_loops_in_loops(new: bool) -> None:
    def graph_of(routine: Callable[[Any], Any] | None) -> tuple[Any, Any]:
        graph = tf.Graph()
        with graph.as_default():

            def inner(j: Any, h: Any) -> Any:
                value = tf.negative(h, name="neg")
                return j + 1, (routine(value) if routine is not None else value) + 1.0

            def outer(i: Any, h: Any) -> Any:
                _, h = v1.while_loop(lambda j, _: j < 2, inner, [tf.constant(0), h])
                return i + 1, tf.sin(h)

            _, h = v1.while_loop(
                lambda i, _: i < 3, outer, [tf.constant(0), tf.constant([0.1, 0.2])]
            )
        return graph, h

    graph, h = graph_of(double)
    with new_session(graph) as session:
        wanted = session.run(h)
    graph, h = graph_of(None)
    with new_session(graph) as session, amanda.apply(editing(Edit("neg", "after", double, 0))):
        close(session.run(h), wanted)


# Branches.


def branching(ops: Ops, flag: Any, x: Any, w: Any) -> Any:
    h = ops("Exp", "first", x)
    taken = v1.cond(
        flag,
        lambda: ops("Tanh", "then", ops("MatMul", "mm1", h, w)),
        lambda: ops("Sin", "other", ops("MatMul", "mm2", h, w)),
    )
    return ops("Sum", "loss", ops("Square", "last", taken))


@pytest.mark.slow
@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize(
    "edit",
    [
        Edit("first", "before", shifted, 0),
        Edit("first", "after", shifted, 0),
        Edit("last", "before", shifted, 0),
        Edit("MatMul", "before", shifted, 1),
        Edit("MatMul", "before", shifted, 0),
        Edit("MatMul", "after", shifted, 0),
        Edit("MatMul", "grad_in", shifted, 1),
        Edit("MatMul", "grad_out", shifted, 0),
        Edit("last", "grad_in", shifted, 0),
    ],
    ids=lambda e: f"{e.name}-{e.kind}-{e.position}",
)
def test_edits_of_branches(new: bool, flag: bool, edit: Edit) -> None:
    check(branching, [np.array(flag), *VALUES], [edit])


@pytest.mark.parametrize("flag", [True, False])
def test_only_what_runs_is_counted(new: bool, flag: bool) -> None:
    built = build(branching, [np.array(flag), *VALUES])
    seen, watching = counting("MatMul")
    with new_session(built.graph) as session, amanda.apply(watching):
        results(session, built)
    assert [name.rpartition("/")[2] for name in seen] == ["mm1" if flag else "mm2"]


def test_the_predicate_is_edited(new: bool) -> None:
    graph = tf.Graph()
    with graph.as_default():
        flag = tf.greater(tf.constant(2.0), 1.0, name="flag")
        chosen = v1.cond(flag, lambda: tf.constant(1.0), lambda: tf.constant(2.0))
        old = v1.case([(flag, lambda: tf.constant(3.0))], lambda: tf.constant(4.0))
    with new_session(graph) as session:
        with amanda.apply(editing(Edit("flag", "after", tf.logical_not, 0))):
            assert session.run([chosen, old]) == [2.0, 4.0]
        assert session.run([chosen, old]) == [1.0, 3.0]


def test_updates_in_branches_and_loops_happen_once(new: bool) -> None:
    graph = tf.Graph()
    with graph.as_default():
        flag = v1.placeholder(tf.bool, [])
        w = v1.get_variable("w", initializer=1.0, use_resource=True)
        moved = v1.cond(flag, lambda: w.assign_add(tf.negative(-1.0, name="neg")).op, tf.no_op)
        looped = v1.while_loop(
            lambda i: i < 3,
            lambda i: i + tf.cast(0 * w.assign_add(tf.negative(-1.0, name="neg")), tf.int32) + 1,
            [tf.constant(0)],
        )
    with new_session(graph) as session:
        session.run(w.initializer)
        with amanda.apply(editing(Edit("neg", "after", lambda v: v * 10, 0))):
            session.run(moved, {flag: True})
            assert session.run(w) == 11.0
            session.run(moved, {flag: False})
            assert session.run(w) == 11.0
            assert session.run(looped) == 3
            assert session.run(w) == 41.0
        session.run(moved, {flag: True})
        assert session.run(w) == 42.0


def test_a_loop_over_a_sequence_with_arrays(new: bool) -> None:
    (x,) = arrays((4, 2, 3))
    weight = arrays((5, 2), seed=1)[0]

    def graph_of(routine: Callable[[Any], Any] | None) -> tuple[Any, Any]:
        graph = tf.Graph()
        with graph.as_default():
            sequence = v1.TensorArray(tf.float32, 4).unstack(tf.constant(x))
            w = v1.get_variable("w", initializer=weight, use_resource=True)

            def step(t: Any, state: Any, out: Any) -> Any:
                read = straight(tf.convert_to_tensor(w), routine) if routine else w
                joined = tf.concat([sequence.read(t), state], 1)
                state = tf.tanh(tf.matmul(joined, read, name="cell"))
                return t + 1, state, out.write(t, state)

            start = [tf.constant(0), tf.zeros([2, 2]), v1.TensorArray(tf.float32, 4)]
            _, _, out = v1.while_loop(lambda t, *_: t < 4, step, start)
            stacked = tf.negative(out.stack(), name="stacked")
            loss = tf.reduce_sum(tf.square(stacked, name="square"))
            (grad,) = tf.gradients(loss, [w])
            return graph, [w.initializer, stacked, grad]

    graph, (init, *fetches) = graph_of(None)
    with new_session(graph) as session:
        session.run(init)
        plain = session.run(fetches)
        with amanda.apply(editing(Edit("square", "grad_in", double, 0))):
            close(session.run(fetches), [plain[0], plain[1] * 2])
        with amanda.apply(before("cell", shifted, 1)):
            if not new:
                with pytest.raises(UnsupportedError, match="TensorFlow 1"):
                    session.run(fetches)
                return
            found = session.run(fetches)
        equal(session.run(fetches), plain)
    graph, (init, *fetches) = graph_of(shifted)
    with new_session(graph) as session:
        session.run(init)
        close(found, session.run(fetches))
