"""Tools that are made of one function: what patterns match, and what the functions get."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

import amanda
from amanda import OpContext, Tool, select
from amanda_core.engine.selection import Patterns
from amanda_core.errors import ActionError, AmandaWarning, PositionError, SelectionError
from amanda_core.testing.toy import framework as toy

from .making import model

pytestmark = pytest.mark.usefixtures("driver")


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("linear", (), [7.0]),
        ("encoder.first", (), [7.0]),
        ("encoder.*", (), [7.0]),
        ("*", (), [7.0, 7.0, 14.0]),
        (["relu", "add"], (), [7.0, 14.0]),
        (re.compile("coder$|add"), (), [7.0, 14.0]),
        ("*", "decoder", [7.0]),
        ("encoder.first/linear", (), [7.0]),
    ],
)
def test_patterns_match_modules_and_operators(
    pattern: Patterns, module: Patterns, expected: list[float]
) -> None:
    seen: list[float] = []
    with amanda.apply(amanda.look(pattern, lambda value: seen.append(value.data), module=module)):
        assert model() == 14
        assert model() == 14
    assert seen == expected * 2


def test_looking_at_inputs_and_at_the_name_of_the_operator() -> None:
    seen: list[Any] = []

    def note(weight: toy.Value, name: str) -> str:
        seen.append((name, weight.data))
        return "ignored"

    with amanda.apply(amanda.look("linear", note, inputs=[1])):
        assert model() == 14
    assert seen == [("encoder.first/linear", 3.0)]


def test_edits_take_effect_and_compose() -> None:
    seen: list[float] = []
    five = amanda.edit("linear", lambda weight: toy.Value(5.0), inputs=[1])
    negative = amanda.edit("decoder", lambda value: toy.Value(-value.data), outputs=[0])
    with amanda.apply(five, negative, amanda.look("add", lambda v: seen.append(v.data))):
        assert model() == -22
    assert seen == [-22.0]
    assert model() == 14


def test_an_analysis_routine_becomes_a_tool() -> None:
    @amanda.on("*", module="encoder*")
    def doubling(context: OpContext) -> None:
        context.insert_after_op(lambda value: toy.Value(2 * value.data), outputs=[0])

    assert isinstance(doubling, Tool)
    assert doubling.tool_name == "on('*', doubling)"
    with amanda.apply(doubling.where(select(steps=[0]))):
        assert model() == 28
        amanda.step()
        assert model() == 14


def test_a_routine_for_the_backward_program() -> None:
    seen: list[str] = []

    @amanda.on("linear", backward=True)
    def note(context: OpContext) -> None:
        assert context.is_backward()
        seen.append(context.op_type)

    with amanda.apply(note):
        model()
    assert seen


@pytest.mark.parametrize("pattern", ["Linear(4, 4)", "", "a b", 3, toy.Value, [], ["ok", "not ok"]])
def test_what_is_neither_a_module_nor_an_operator_is_refused(pattern: Any) -> None:
    for make in (
        lambda: amanda.look(pattern, print),
        lambda: amanda.edit(pattern, print),
        lambda: amanda.on(pattern),
        lambda: amanda.on("linear", module=pattern or "a b"),
    ):
        with pytest.raises(SelectionError):
            make()


def test_functions_and_positions_are_checked() -> None:
    with pytest.raises(ActionError, match="cannot be called"):
        amanda.look("linear", "print")  # type: ignore[arg-type]
    with pytest.raises(ActionError, match="Both inputs and outputs"):
        amanda.edit("linear", print, inputs=[0], outputs=[0])
    with pytest.raises(PositionError), amanda.apply(amanda.edit("relu", abs, inputs=[1])):
        model()


def test_a_pattern_without_an_operator_is_said_at_the_end() -> None:
    with (
        pytest.warns(
            AmandaWarning,
            match=r"look\('lineer', print\) was given no operator. Did you "
            "mean 'linear'",
        ),
        amanda.apply(amanda.look("lineer", print)),
    ):
        model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with amanda.apply(amanda.look("lineer", print)):
            pass  # No operator ran at all.
        with amanda.apply(tool := amanda.look("linear", lambda value: None)):
            model()
        with amanda.apply(tool):  # What matched before is not analysed again.
            toy.relu(toy.Value(1.0))
