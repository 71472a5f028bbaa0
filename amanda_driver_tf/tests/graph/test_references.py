"""Variables by reference: watched, edited where they are read, and not where they are written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda import OpContext
from amanda_core.errors import UnsupportedError
from amanda_core.testing.kit.tools import before, tool

from ..comparison import equal
from .reference_programs import new_session, v1


def reference() -> tuple[Any, Any, Any]:
    graph = tf.Graph()
    with graph.as_default():
        w = v1.get_variable("w", [2], initializer=v1.ones_initializer(), use_resource=False)
        return graph, w, v1.assign_add(w, [1.0, 2.0], name="adding")


@pytest.mark.parametrize("position", [0, None])
def test_a_reference_cannot_be_edited(position: int | None) -> None:
    graph, w, add = reference()

    def change(*values: Any) -> Any:
        return [value * 2 for value in values] if len(values) > 1 else values[0] * 2

    with new_session(graph) as session:
        session.run(w.initializer)
        with amanda.apply(before("adding", change, position)):
            with pytest.raises(UnsupportedError, match="writes to") as caught:
                session.run(add)
            assert "adding" in str(caught.value)
        session.run(add)


def test_a_reference_is_watched() -> None:
    graph, w, add = reference()
    seen: list[Any] = []

    def analyse(context: OpContext) -> None:
        context.insert_before_op(lambda *values: seen.append([v.numpy().tolist() for v in values]))
        context.insert_after_op(lambda out: seen.append(out.numpy().tolist()))

    with new_session(graph) as session:
        session.run(w.initializer)
        with amanda.apply(tool(analyse, "adding")):
            equal(session.run(add), np.array([2, 3], np.float32))
        equal(session.run(w), np.array([2, 3], np.float32))
    assert seen == [[[1.0, 1.0], [1.0, 2.0]], [2.0, 3.0]]


@pytest.mark.parametrize("staged", [False, True])
def test_what_a_reference_holds_is_edited_where_it_is_read(staged: bool) -> None:
    graph, w, _ = reference()
    with graph.as_default():
        read = tf.identity(w, name="reading")
        total = tf.square(read) + w
        gradient = tf.gradients(total, w._ref())[0]

    def triple(value: Any) -> Any:
        return value * 3

    routine = amanda.staged(triple) if staged else triple
    with new_session(graph) as session:
        session.run(w.initializer)
        with amanda.apply(before("reading", routine)):
            equal(session.run(read), np.array([3, 3], np.float32))
            equal(session.run(total), np.array([10, 10], np.float32))
            equal(session.run(gradient), np.array([7, 7], np.float32))
        equal(session.run(w), np.array([1, 1], np.float32))


@pytest.mark.parametrize("staged", [False, True])
def test_references_that_hold_nothing_yet_are_none(staged: bool) -> None:
    graph, w, _ = reference()
    with graph.as_default():
        uninitialised = v1.report_uninitialized_variables([w])
    seen: dict[str, list[bool]] = {}

    def analyse(context: OpContext) -> None:
        if context.op_type not in ("Assign", "IsVariableInitialized"):
            return
        here = seen.setdefault(context.op_type, [])

        def note(*values: Any) -> Any:
            here.extend(value is None for value in values)
            return [None if value is None else tf.identity(value) for value in values]

        context.insert_before_op(amanda.staged(note) if staged else note)

    with new_session(graph) as session, amanda.apply(tool(analyse)):
        assert session.run(uninitialised) == [b"w"]
        session.run(w.initializer)
        assert session.run(uninitialised).size == 0
        equal(session.run(w), np.array([1, 1], np.float32))
    assert set(seen["IsVariableInitialized"]) == {True}
    assert seen["Assign"] == [True, False]


def test_nothing_can_be_put_where_a_reference_holds_nothing() -> None:
    graph, w, _ = reference()
    with (
        new_session(graph) as session,
        amanda.apply(before("Assign", lambda old, new: [new, new])),
        pytest.raises(UnsupportedError, match="has no value"),
    ):
        session.run(w.initializer)
