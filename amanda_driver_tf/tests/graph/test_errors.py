"""Exceptions in routines and analysis: the user's own, with notes, and the next run works."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda import OpContext
from amanda_core.errors import (
    ActionError,
    LateActionError,
    ReentryError,
    ReplacementConflictError,
    RoutineResultError,
)
from amanda_core.testing.kit.tools import Edit, before, editing, tool

from ..comparison import close, equal
from .reference_programs import counting, double, new_session, v1


class OwnError(Exception):
    """An error of the user."""


class Small:
    def __init__(self) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            self.w = v1.get_variable("w", initializer=np.eye(2, dtype=np.float32))
            self.count = v1.get_variable("count", initializer=0)
            self.counted = self.count.assign_add(1)
            self.mm = tf.matmul(tf.ones([2, 2]), self.w, name="mm")
            self.act = tf.tanh(self.mm, name="act")
            self.total = tf.reduce_sum(self.act)
            self.train = v1.train.GradientDescentOptimizer(0.1).minimize(self.total)
            self.init = v1.global_variables_initializer()


@pytest.fixture
def small() -> Small:
    return Small()


@pytest.fixture
def session(small: Small) -> Any:
    with new_session(small.graph) as session:
        session.run(small.init)
        yield session


def failing(when: list[bool], error: BaseException | None = None) -> Any:
    def routine(*values: Any) -> None:
        if when[0]:
            raise error or OwnError("mine")

    return routine


@pytest.mark.parametrize("kind", ["before", "after", "grad_out", "grad_in"])
def test_a_routine_raises(small: Small, session: Any, kind: str) -> None:
    when = [True]
    with amanda.apply(editing(Edit("mm", kind, failing(when)))):
        kept = session.run(small.w) if kind.startswith("grad") else None
        for _ in range(2):
            with pytest.raises(OwnError, match="mine") as caught:
                session.run([small.total, small.train])
            notes = "\n".join(caught.value.__notes__)
            assert "'mm'" in notes
            assert "failing" in notes
            assert "Tool(" in notes
        if kept is not None:
            equal(session.run(small.w), kept)
        when[0] = False
        session.run([small.total, small.train])
    session.run(small.train)


POINTS = [
    *("insert_before_op", "insert_after_op", "replace_op"),
    *("insert_before_backward_op", "insert_after_backward_op", "replace_backward_op"),
    *("raw insert_before_backward_op", "raw insert_after_backward_op"),
    "raw replace_backward_op",
]


@pytest.mark.parametrize("staging", [False, True], ids=["host", "staged"])
@pytest.mark.parametrize("point", POINTS)
def test_the_note_names_tool_routine_and_op(
    small: Small, session: Any, point: str, staging: bool
) -> None:
    class Failing(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(self.analyse, backward=point.startswith("raw "))

        def analyse(self, context: OpContext) -> None:
            if context.name in ("act", GRADIENT):
                routine = amanda.staged(lambda *v: wrong(*v)) if staging else wrong
                getattr(context, point.removeprefix("raw "))(routine)
                raw = context.is_backward()
                numbers.append(context.get_backward_op_id() if raw else context.get_op_id())

    def wrong(*values: Any) -> Any:
        raise OwnError("mine")

    numbers: list[int | None] = []
    plain = session.run([small.w, small.total])
    with amanda.apply(Failing()):
        for _ in range(2):
            with pytest.raises(OwnError, match="mine") as caught:
                session.run([small.total, small.train])
            note, *others = caught.value.__notes__
            assert all("Then also" in other for other in others)
            assert point.removeprefix("raw ") in note
            assert "tool test_the_note" in note
            assert "Failing" in note
            assert ("lambda" if staging else "wrong") in note
            assert repr(GRADIENT if point.startswith("raw ") else "act") in note
            assert f"id {numbers[0]}" in note
            assert "test_errors.py:" in note
    if point != "insert_after_op":  # The gradient waits for all but this one.
        equal(session.run([small.w, small.total]), plain)
    session.run([small.total, small.train])


GRADIENT = "gradients/act_grad/TanhGrad"


def test_a_staged_routine_raises_when_it_is_traced(small: Small, session: Any) -> None:
    @amanda.staged
    def routine(value: Any) -> Any:
        raise OwnError("mine")

    with amanda.apply(before("mm", routine, 1)), pytest.raises(OwnError) as caught:
        session.run(small.mm)
    assert any("'mm'" in note for note in caught.value.__notes__)
    session.run(small.mm)


@pytest.mark.parametrize("backward", [False, True])
def test_an_analysis_raises(small: Small, session: Any, backward: bool) -> None:
    fails = [True]
    analysed: list[str] = []

    def analyse(context: OpContext) -> None:
        analysed.append(context.name)
        if fails[0]:
            raise OwnError("mine")

    op = "gradients/act_grad/TanhGrad" if backward else "act"
    with amanda.apply(tool(analyse, op, backward=backward), before("mm", double, 1)):
        for _ in range(2):
            with pytest.raises(OwnError) as caught:
                session.run([small.total, small.train])
            assert any(f"'{op}'" in note for note in caught.value.__notes__)
        assert len(analysed) == 2
        fails[0] = False
        session.run([small.total, small.train])
        session.run([small.total, small.train])
        assert len(analysed) == 3


def test_what_ran_before_the_exception_is_not_run_twice(small: Small, session: Any) -> None:
    when = [True]
    with small.graph.as_default(), tf.control_dependencies([small.counted]):
        later = tf.matmul(small.w, small.w, name="later")
    with amanda.apply(editing(Edit("later", "after", failing(when)))):
        with pytest.raises(OwnError):
            session.run(later)
        assert session.run(small.count) == 1
        when[0] = False
        session.run(later)
        assert session.run(small.count) == 2


def test_the_first_of_several_exceptions(small: Small, session: Any) -> None:
    with small.graph.as_default():
        others = [tf.negative(small.w, name=f"neg{i}") for i in range(4)]

    raised: list[int] = []

    def routine(*values: Any) -> None:
        raised.append(len(raised))
        time.sleep(0.02)  # Executors go on with what does not wait for this.
        raise OwnError(f"number {raised[-1]}")

    with amanda.apply(before("Neg", routine)):
        for _ in range(2):
            raised.clear()
            with pytest.raises(OwnError, match="number 0") as caught:
                session.run(others)
            _, *notes = caught.value.__notes__
            assert notes == [f"Then also OwnError: number {number}" for number in raised[1:]]
    session.run(others)


def test_an_interrupt_goes_through(small: Small, session: Any) -> None:
    when = [True]
    with amanda.apply(editing(Edit("mm", "before", failing(when, KeyboardInterrupt())))):
        with pytest.raises(KeyboardInterrupt):
            session.run(small.mm)
        when[0] = False
        equal(session.run(small.mm), np.ones((2, 2), np.float32))


def test_tensorflows_own_errors_stay_what_they_are(small: Small, session: Any) -> None:
    with small.graph.as_default():
        x = v1.placeholder(tf.float32, None)
        wrong = tf.matmul(x, small.w, name="wrong")
    with amanda.apply(before("mm", double, 1), counting()[1]):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            session.run(wrong, {x: np.ones((2, 3))})
        assert caught.value.op is None or caught.value.op.name == "wrong"
        equal(session.run(wrong, {x: np.ones((1, 2))}), np.ones((1, 2), np.float32))


def test_an_uninitialised_variable_is_tensorflows_error(small: Small) -> None:
    with new_session(small.graph) as session, amanda.apply(before("mm", double, 1)):
        with pytest.raises(tf.errors.FailedPreconditionError):
            session.run(small.mm)
        session.run(small.init)
        close(session.run(small.mm), np.full((2, 2), 2, np.float32))


def test_two_replacements_name_both_tools(small: Small, session: Any) -> None:
    class One(amanda.Tool):
        pass

    class Two(amanda.Tool):
        pass

    tools = [One(), Two()]
    for each in tools:
        each.add_inst_for_op(lambda c: c.replace_op(tf.identity) if c.name == "act" else None)
    with amanda.apply(*tools), pytest.raises(ReplacementConflictError) as caught:
        session.run(small.act)
    assert "One" in str(caught.value)
    assert "Two" in str(caught.value)


def test_late_actions_are_refused(small: Small, session: Any) -> None:
    late = tool(lambda c: c.insert_before_op(double), "act", require_outputs=True)
    with amanda.apply(late), pytest.raises(LateActionError):
        session.run(small.act)
    from_backward = tool(
        lambda c: c.insert_before_op(double), "gradients/act_grad/TanhGrad", backward=True
    )
    with amanda.apply(from_backward), pytest.raises(ActionError):
        session.run([small.total, small.train])


def test_a_replacement_of_nothing_is_refused(small: Small, session: Any) -> None:
    with (
        amanda.apply(editing(Edit("act", "replace", lambda value: None))),
        pytest.raises(RoutineResultError, match="returned None"),
    ):
        session.run(small.act)


def test_tools_cannot_be_applied_in_a_routine(small: Small, session: Any) -> None:
    def routine(value: Any) -> None:
        with amanda.apply(amanda.Tool()):
            pass

    with amanda.apply(before("act", routine)), pytest.raises(ReentryError):
        session.run(small.act)


def test_a_session_run_in_a_routine_is_not_instrumented(small: Small, session: Any) -> None:
    other, seen = Small(), []

    def routine(value: Any) -> Any:
        with new_session(other.graph) as inner:
            inner.run(other.init)
            seen.append(inner.run(other.mm))
        return value * 3.0

    with amanda.apply(before("mm", routine, 1)):
        close(session.run(small.mm), np.full((2, 2), 3, np.float32))
    equal(seen, [np.ones((2, 2), np.float32)])


def test_operators_in_routines_are_not_counted(small: Small, session: Any) -> None:
    seen, watching = counting()

    def routine(value: Any) -> Any:
        return tf.linalg.matmul(value, value) + tf.function(tf.tanh)(value)

    with amanda.apply(watching, before("mm", routine, 1)):
        session.run(small.mm)
    assert sorted(seen) == ["mm", "mm/ReadVariableOp"]


def test_an_exception_in_a_step_listener(small: Small, session: Any) -> None:
    def fail(step: int) -> None:
        raise OwnError("listener")

    listening = amanda.Tool()
    listening.add_inst_for_step(None, fail)
    with amanda.apply(listening), pytest.raises(OwnError) as caught:
        session.run(small.counted)
    assert caught.value.__notes__
    assert session.run(small.count) == 1


def test_the_same_tool_applied_again_raises_again(small: Small, session: Any) -> None:
    """The clones are reused."""
    plain = session.run(small.act)
    tool = before("act", failing([True]))
    for _ in range(3):
        with amanda.apply(tool), pytest.raises(OwnError) as caught:
            session.run(small.act)
        assert len(caught.value.__notes__) == 1
        equal(session.run(small.act), plain)
