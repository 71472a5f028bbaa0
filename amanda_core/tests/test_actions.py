"""Requests of analysis routines: valid ones, late ones, and the errors of wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import amanda
from amanda_core import ActionKind, IPoint, OpContext
from amanda_core.errors import LateActionError, ReplacementConflictError, RoutineResultError
from amanda_core.testing.toy import framework as toy

from .making import Pruner, linear_model, session_of, tool

pytestmark = pytest.mark.usefixtures("driver")


# Results.


@pytest.mark.parametrize("result", [toy.Value(1.0), (), (toy.Value(1.0),) * 3])
def test_wrong_number_of_values_names_tool_routine_and_op(result: Any) -> None:
    with (
        amanda.apply(Pruner(result, inputs=[0, 1])),
        pytest.raises(RoutineResultError) as caught,
    ):
        linear_model()
    count = len(result) if isinstance(result, tuple) else 1
    message = str(caught.value)
    assert f"returned {count} value" in message
    assert "given 2" in message
    assert "Pruner" in message
    assert "mask_weight" in message
    assert "encoder/linear" in message


def test_two_values_for_one_are_a_wrong_number() -> None:
    with (
        amanda.apply(Pruner((toy.Value(1.0),) * 2, inputs=[0])),
        pytest.raises(RoutineResultError, match="returned 2 values, but was given 1"),
    ):
        linear_model()


@pytest.mark.parametrize("wrap", [tuple, list])
def test_one_value_may_come_alone_or_in_a_sequence(wrap: Callable[[Sequence[Any]], Any]) -> None:
    with amanda.apply(Pruner(wrap([toy.Value(10.0)]), inputs=[1])):
        assert linear_model().data == 2.0 * 10 + 1


def test_a_list_position_may_be_returned_alone_or_in_a_sequence() -> None:
    new = [toy.Value(5.0), toy.Value(6.0)]
    for result in (new, (new,), [new]):
        with amanda.apply(Pruner(result, inputs=[0])):
            assert toy.total([toy.Value(0.0), toy.Value(0.0)]).data == 11.0


def test_a_replacement_that_returns_none_is_an_error() -> None:
    with (
        amanda.apply(Pruner(None, "replace_op")),
        pytest.raises(RoutineResultError, match=r"replacement returned None.*Pruner.*mask_weight"),
    ):
        linear_model()


# Two replacements.


class First(amanda.Tool):
    def __init__(self) -> None:
        self.add_inst_for_op(lambda c: c.replace_op(lambda *v: toy.Value(1.0)))


class Second(First):
    pass


def test_two_replacements_in_one_apply_name_both_tools() -> None:
    with (
        amanda.apply(First(), Second()),
        pytest.raises(ReplacementConflictError, match=r"First.*Second.*replace_op"),
    ):
        linear_model()


def test_two_replacements_in_nested_apply_name_both_tools() -> None:
    outer = First()
    inner = Second()
    with amanda.apply(outer):
        assert linear_model().data == 1.0
        with (
            amanda.apply(inner),
            pytest.raises(ReplacementConflictError, match=r"First.*Second") as caught,
        ):
            linear_model()
        # Checked at the request, so that the error names the routine.
        assert "In analysis by tool Second" in caught.value.__notes__[0]
        assert linear_model().data == 1.0


def test_two_replacements_by_one_tool_are_an_error() -> None:
    twice = First()
    twice.add_inst_for_op(lambda c: c.replace_op(lambda *v: toy.Value(2.0)))
    with amanda.apply(twice), pytest.raises(ReplacementConflictError, match=r"First and First"):
        linear_model()


def test_two_replacements_of_the_backward_op_are_an_error() -> None:
    def replace(context: OpContext) -> None:
        context.replace_backward_op(lambda g: (g, g, g))

    with amanda.apply(tool(replace), tool(replace)), pytest.raises(ReplacementConflictError):
        linear_model()


def test_two_tools_may_replace_different_ops() -> None:
    def replace(name: str) -> amanda.Tool:
        return tool(lambda c: c.replace_op(lambda *v: v[0]) if c.op_type == name else None)

    with amanda.apply(replace("relu"), replace("mul")):
        assert toy.relu(toy.mul(toy.Value(-2.0), toy.Value(3.0))).data == -2.0


# Too late.

FORWARD_ACTIONS = ["insert_before_op", "insert_after_op", "replace_op"]
BACKWARD_ACTIONS = [
    "insert_before_backward_op",
    "insert_after_backward_op",
    "replace_backward_op",
]


def ask(kind: str) -> Callable[[OpContext], Any]:
    return lambda context: getattr(context, kind)(lambda *values: values)


@pytest.mark.parametrize("kind", FORWARD_ACTIONS)
@pytest.mark.parametrize("require_outputs", [False, True])
def test_forward_action_from_backward_context_is_late(kind: str, require_outputs: bool) -> None:
    late = tool(ask(kind), backward=True, require_outputs=require_outputs)
    with amanda.apply(late):
        y = toy.relu(toy.parameter(1.0))
        with pytest.raises(LateActionError, match=rf"{kind}.*the forward op has run"):
            toy.backward(y)


@pytest.mark.parametrize("kind", ["insert_before_op", "replace_op"])
def test_insert_before_from_after_analysis_is_late(kind: str) -> None:
    late = tool(ask(kind), require_outputs=True)
    with amanda.apply(late), pytest.raises(LateActionError, match=rf"{kind} at after_forward_op"):
        linear_model()


@pytest.mark.parametrize("kind", ["insert_before_backward_op", "replace_backward_op"])
def test_insert_before_from_after_backward_analysis_is_late(kind: str) -> None:
    late = tool(ask(kind), backward=True, require_outputs=True)
    with amanda.apply(late):
        y = toy.relu(toy.parameter(1.0))
        with pytest.raises(LateActionError, match=kind):
            toy.backward(y)


@pytest.mark.parametrize("kind", FORWARD_ACTIONS + BACKWARD_ACTIONS)
def test_an_action_outside_of_a_routine_is_late(kind: str) -> None:
    kept: list[OpContext] = []
    with amanda.apply(tool(kept.append)):
        linear_model()
        with pytest.raises(LateActionError, match="outside an analysis routine"):
            ask(kind)(kept[0])


def test_an_action_inside_an_instrumentation_routine_is_late() -> None:
    def analyse(context: OpContext) -> None:
        context.insert_before_op(lambda *values: context.insert_after_op(lambda y: y))

    with amanda.apply(tool(analyse)), pytest.raises(LateActionError):
        linear_model()


def test_every_action_at_or_behind_its_point_is_in_time() -> None:
    in_time = {
        (False, False): FORWARD_ACTIONS + BACKWARD_ACTIONS,
        (False, True): ["insert_after_op", *BACKWARD_ACTIONS],
        (True, False): BACKWARD_ACTIONS,
        (True, True): ["insert_after_backward_op"],
    }
    recorded: list[str] = []

    for (backward, require_outputs), kinds in in_time.items():
        for kind in kinds:

            def analyse(context: OpContext, kind: str = kind) -> None:
                if context.op_type in ("relu", "ReluBackward"):
                    getattr(context, kind)(lambda value: value)
                    recorded.append(kind)

            asked = tool(analyse, backward=backward, require_outputs=require_outputs)
            with amanda.apply(asked):
                toy.backward(toy.relu(toy.parameter(1.0)))
    assert recorded == [kind for kinds in in_time.values() for kind in kinds]


# Marks and capabilities.


def test_the_staged_mark_is_on_the_action() -> None:
    @amanda.staged
    def halve(value: toy.Value) -> toy.Value:
        return toy.Value(value.data / 2)

    def analyse(context: OpContext) -> None:
        context.insert_before_op(halve)
        context.insert_before_op(lambda x: x)

    with amanda.apply(tool(analyse)) as handle:
        assert toy.relu(toy.Value(4.0)).data == 2.0
        session = session_of(handle)
        (context,) = session.contexts()
        assert [a.staged for a in session.actions_of(context)] == [True, False]


def test_the_kinds_of_action_are_the_six_of_the_paper() -> None:
    assert {kind.value for kind in ActionKind} == {*FORWARD_ACTIONS, *BACKWARD_ACTIONS}
    assert [point.value for point in sorted(IPoint, key=lambda point: point.rank)] == [
        "before_forward_op",
        "after_forward_op",
        "before_backward_op",
        "after_backward_op",
    ]
