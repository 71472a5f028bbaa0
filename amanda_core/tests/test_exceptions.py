"""Exceptions of routines: they keep their type, and a note tells where they come from."""

from __future__ import annotations

from typing import Any

import pytest

import amanda
from amanda_core import IPoint, OpContext
from amanda_core.errors import AmandaWarning
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy.driver import ToyDriver

from .making import session_of, site, tool

pytestmark = pytest.mark.usefixtures("driver")


class Broken(Exception):
    """An exception of the user's own."""


class Failing(amanda.Tool):
    def __init__(self, where: str) -> None:
        if where == "analysis":
            self.add_inst_for_op(self.raise_broken)
        elif where == "routine":
            self.add_inst_for_op(lambda c: c.insert_before_op(self.raise_broken))
        elif where == "replacement":
            self.add_inst_for_op(lambda c: c.replace_op(self.raise_broken))
        elif where == "rule":
            self.add_inst_for_op(lambda c: None)
            self.add_context_rule(before=self.raise_broken)

    def raise_broken(self, *_: Any) -> None:
        raise Broken("of the user")


def model() -> float:
    with toy.scope("encoder"):
        return toy.linear(toy.Value(2.0), toy.Value(3.0)).data


@pytest.mark.parametrize("where", ["analysis", "routine", "replacement", "rule"])
def test_exception_of_a_routine_propagates_with_its_type_and_a_note(where: str) -> None:
    ids: list[int] = []
    watching = tool(lambda c: ids.append(c.get_op_id()))
    with amanda.apply(watching, Failing(where)), pytest.raises(Broken) as caught:
        model()
    assert str(caught.value) == "of the user"
    (note,) = caught.value.__notes__
    assert "tool Failing" in note
    assert "routine Failing.raise_broken" in note
    assert "'encoder/linear'" in note
    assert f"id {ids[0]}" in note
    assert "module 'encoder'" in note
    assert f"at {__file__.rpartition('/')[2]}:" in note


def test_exception_of_a_backward_routine_has_a_note_too() -> None:
    def analyse(context: OpContext) -> None:
        raise Broken

    with amanda.apply(tool(analyse, backward=True)):
        y = toy.relu(toy.parameter(1.0))
        with pytest.raises(Broken) as caught:
            toy.backward(y)
    (note,) = caught.value.__notes__
    assert "before_backward_op" in note
    assert "ReluBackward" in note


def test_exception_of_a_routine_does_not_end_the_session_by_itself(driver: ToyDriver) -> None:
    calls: list[str] = []

    def fail_once(*values: toy.Value) -> None:
        calls.append("call")
        if len(calls) == 1:
            raise Broken

    with amanda.apply(tool(lambda c: c.insert_before_op(fail_once))) as handle:
        with pytest.raises(Broken):
            model()
        assert not session_of(handle).closed
        assert driver.detached == 0
        model()
    assert len(calls) == 2


def test_after_an_exception_operators_outside_of_routines_are_instrumented_again() -> None:
    # The depth of routines must be back at 0, or everything would run vanilla from here on.
    with amanda.apply(Failing("routine")):
        for _ in range(2):
            with pytest.raises(Broken):
                model()
    with amanda.apply(Failing("analysis")):
        for _ in range(2):
            with pytest.raises(Broken):
                model()


def test_exception_of_a_listener_has_a_note() -> None:
    failing = amanda.Tool()

    def fail(number: int) -> None:
        raise Broken

    failing.add_inst_for_step(end=fail)
    with amanda.apply(failing), pytest.raises(Broken) as caught:
        amanda.step()
    assert "listener of tool Tool" in caught.value.__notes__[0]


def test_the_first_deferred_exception_is_raised_and_the_others_are_noted() -> None:
    first, second = Broken("first"), ValueError("second")
    with amanda.apply() as handle:
        session = session_of(handle)
        session.raise_pending()
        session.defer(first)
        session.defer(second)
        with pytest.raises(Broken) as caught:
            session.raise_pending()
        assert caught.value is first
        assert first.__notes__ == ["Then also ValueError: second"]
        session.raise_pending()


def test_a_warning_is_given_once_in_a_session() -> None:
    with amanda.apply() as handle:
        session = session_of(handle)
        with pytest.warns(AmandaWarning, match="look"):
            session.warn_once("look")
        session.warn_once("look")  # A second warning would be an error here.
        with pytest.warns(AmandaWarning, match="again"):
            session.warn_once("again")


def test_where_leaves_out_what_is_not_known() -> None:
    with amanda.apply() as handle:
        context = session_of(handle).open(site("a"), None)
        assert context.where == f"op 'layer/a' (id {context.get_op_id()})"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_deferred_exception_becomes_a_note_when_the_program_is_told_to_stop(
    stop: type[BaseException],
) -> None:
    def program() -> None:
        with amanda.apply() as handle:
            session_of(handle).defer(Broken("of the user"))
            raise stop

    with pytest.raises(stop) as raised:
        program()
    assert any("Broken: of the user" in note for note in raised.value.__notes__)


def test_an_exception_deferred_to_a_closed_session_goes_to_the_one_that_runs_now() -> None:
    applied = amanda.apply(tool(lambda c: None))
    with applied as handle:
        first = session_of(handle)
    # A compiled function names the session in which it was made, and is kept.
    with applied as handle:
        assert session_of(handle) is not first
        first.defer(Broken("later"))
        with pytest.raises(Broken, match="later"):
            session_of(handle).raise_pending()


def test_what_resumed_contexts_note_belongs_to_the_session_that_runs_now() -> None:
    double = tool(lambda c: c.insert_before_op(lambda x: x * 2.0))
    triple = tool(lambda c: c.insert_before_op(lambda x: x * 3.0))
    applied = amanda.apply(double, triple)
    with applied as handle:
        context = session_of(handle).open(site(), None, [1.0])
        plan = context.trigger_callback(IPoint.BEFORE_FORWARD)
    with applied as handle:
        assert plan([1.0]) == [6.0]
        assert [conflict.position for conflict in handle.conflicts()] == [0]
