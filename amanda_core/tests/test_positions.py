"""Positions of inputs, outputs and gradients, and the ways to write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

import amanda
from amanda_core import Action, ActionKind, OpContext
from amanda_core.errors import ActionError, PositionError
from amanda_core.testing.toy import framework as toy

from .making import Pruner, linear_model, session_of, tool

pytestmark = pytest.mark.usefixtures("driver")


# Positions.


def test_wrong_position_says_how_many_there_are_and_names_them() -> None:
    with (
        amanda.apply(Pruner(None, inputs=[3])),
        pytest.raises(PositionError, match=r"no inputs\[3\]: it has 3 \(x, w, b\).*Pruner"),
    ):
        linear_model()


@pytest.mark.parametrize(
    ("kind", "positions"),
    [
        ("insert_after_op", {"outputs": [1]}),
        ("replace_op", {"inputs": [-1]}),
        ("insert_after_backward_op", {"grad_inputs": [3]}),
    ],
)
def test_wrong_position_of_each_sort(kind: str, positions: dict[str, list[int]]) -> None:
    (name,) = positions
    with (
        amanda.apply(Pruner(None, kind, **positions)),
        pytest.raises(PositionError, match=rf"no {name}\["),
    ):
        linear_model()


def test_a_position_that_could_not_be_checked_is_found_out_when_the_routine_is_due() -> None:
    # Before the op runs, the number of its outputs is unknown.
    def analyse(context: OpContext) -> None:
        context.insert_after_op(lambda y: y, outputs=[1])

    with amanda.apply(tool(analyse)), pytest.raises(PositionError, match=r"1 .*there are 1"):
        linear_model()


@pytest.mark.parametrize("positions", [0, True, "0", ["x"], [0.0], [None], [False], 1.5])
def test_something_else_than_a_list_of_positions_is_an_error(positions: Any) -> None:
    with (
        amanda.apply(Pruner(None, inputs=positions)),
        pytest.raises(PositionError, match=r"inputs=.* is not a list of positions.*inputs=\[0\]"),
    ):
        linear_model()


@pytest.mark.parametrize("make", [tuple, range, iter])
def test_any_iterable_of_positions_will_do(make: Callable[[Any], Any]) -> None:
    got: list[tuple[Any, ...]] = []
    positions = make(2) if make is range else make([0, 1])
    with amanda.apply(
        tool(lambda c: c.insert_before_op(lambda *v: got.append(v), inputs=positions))
    ):
        linear_model()
    assert [len(values) for values in got] == [2]


def test_a_routine_that_cannot_be_called_is_an_error() -> None:
    with (
        amanda.apply(tool(lambda c: c.insert_before_op(cast(Any, "mask")))),
        pytest.raises(ActionError, match="'mask' cannot be called"),
    ):
        linear_model()


# Spellings.


@pytest.mark.parametrize(
    ("method", "spellings", "kind"),
    [
        (
            "insert_before_backward_op",
            ("grad_outputs", "grad_out"),
            ActionKind.INSERT_BEFORE_BACKWARD_OP,
        ),
        ("replace_backward_op", ("grad_outputs", "grad_out"), ActionKind.REPLACE_BACKWARD_OP),
        (
            "insert_after_backward_op",
            ("grad_inputs", "grad_in"),
            ActionKind.INSERT_AFTER_BACKWARD_OP,
        ),
    ],
)
def test_both_spellings_of_gradients_are_accepted_and_reserved(
    method: str, spellings: tuple[str, str], kind: ActionKind
) -> None:
    def analyse(context: OpContext) -> None:
        request = getattr(context, method)
        if context.op_type == "relu":
            request(abs, **{context["spelling"]: [0]}, scale=2)
        elif context.op_type == "mul":
            request(abs, [0], scale=2)
        else:
            request(abs, **{spelling: [0] for spelling in spellings})

    def actions(spelling: str) -> list[Action]:
        asked = tool(lambda c: c.update(spelling=spelling), analyse)
        with amanda.apply(asked) as handle:
            toy.relu(toy.Value(1.0))
            toy.mul(toy.Value(1.0), toy.Value(1.0))
            with pytest.raises(ActionError, match="Both"):
                toy.add(toy.Value(1.0), toy.Value(1.0))
            session = session_of(handle)
            return [a for context in session.contexts() for a in session.actions_of(context)]

    for spelling in spellings:
        found = actions(spelling)
        assert len(found) == 2
        for action in found:
            assert (action.kind, action.positions, dict(action.kwargs)) == (
                kind,
                (0,),
                {"scale": 2},
            )


def test_the_papers_positional_call_shapes_work() -> None:
    def routine(*values: Any, **kwargs: Any) -> None:
        """Change nothing."""

    def analyse(context: OpContext) -> None:
        context.insert_before_op(routine, [0], extra=1)
        context.insert_after_op(routine, [0], extra=1)
        context.insert_before_backward_op(routine, [0], extra=1)
        context.insert_after_backward_op(routine, [0], extra=1)

    with amanda.apply(tool(analyse)) as handle:
        toy.backward(toy.relu(toy.parameter(1.0)))
        session = session_of(handle)
        found = [a for context in session.contexts() for a in session.actions_of(context)]
    assert [(action.kind.value, action.positions) for action in found] == [
        ("insert_before_op", (0,)),
        ("insert_after_op", (0,)),
        ("insert_before_backward_op", (0,)),
        ("insert_after_backward_op", (0,)),
    ]


def test_a_position_named_twice_is_refused() -> None:
    asked = tool(lambda c: c.insert_before_op(lambda *values: None, inputs=[1, 1]))
    with amanda.apply(asked), pytest.raises(PositionError, match="names a position twice"):
        linear_model()


# Names of positions that are not those of the method.


@pytest.mark.parametrize(
    ("kind", "given", "meant"),
    [
        ("insert_after_op", {"output": [0]}, "outputs"),
        ("insert_after_op", {"inputs": [0]}, "outputs"),
        ("insert_before_op", {"input": [0]}, "inputs"),
        ("insert_before_op", {"positions": [0]}, "inputs"),
        ("insert_before_backward_op", {"grad_output": [0]}, "grad_outputs"),
        ("replace_op", {"outputs": [0]}, "inputs"),
    ],
)
def test_positions_under_another_name_are_an_error(
    kind: str, given: dict[str, Any], meant: str
) -> None:
    def analyse(context: OpContext) -> None:
        getattr(context, kind)(lambda value: value, **given)

    (name,) = given
    said = f"passes {name}= on to the routine, which has no such parameter.*mean {meant}="
    with amanda.apply(tool(analyse)), pytest.raises(ActionError, match=said):
        linear_model()


def test_a_routine_may_have_a_parameter_of_that_name() -> None:
    seen: list[Any] = []

    def analyse(context: OpContext) -> None:
        def named(*values: Any, output: Any) -> None:
            seen.append(output)

        context.insert_after_op(named, output=[0], observe=True)
        context.insert_after_op(lambda *_, **more: seen.append(more), input=1, observe=True)

    with amanda.apply(tool(analyse)):
        linear_model()
    assert seen[:2] == [[0], {"input": 1}]
