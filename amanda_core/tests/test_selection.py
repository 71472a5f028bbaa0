"""Selections: the ops and steps that a tool is for."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest

import amanda
from amanda import Selection, Tool, select
from amanda_core import OpContext
from amanda_core.errors import NamespaceError, SelectionError
from amanda_core.testing.toy import framework as toy

from .making import model, tool

pytestmark = pytest.mark.usefixtures("driver")


def seen_by(selection: Selection | None, backward: bool = False) -> list[str]:
    seen: list[str] = []
    watching = tool(lambda context: seen.append(context.op_type), backward=backward)
    with amanda.apply(watching.where(selection)):
        model()
        model()
    return seen


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (None, ["linear", "relu", "add"]),
        (select(), ["linear", "relu", "add"]),
        (select(op="relu"), ["relu"]),
        (select(op="*l*"), ["linear", "relu"]),
        (select(op=["add", re.compile("^lin")]), ["linear", "add"]),
        (select(op="RELU"), []),
        (select(op="encoder*"), ["linear"]),
        (select(module="encoder*"), ["linear"]),
        (select(module="*first"), ["linear"]),
        (select(module=re.compile("coder")), ["linear", "relu"]),
        (select(op="*", module="decoder"), ["relu"]),
        (select(namespace="toy"), ["linear", "relu", "add"]),
        (select(namespace="toy/9"), []),
        (select(lambda context: context.op_type == "add"), ["add"]),
        (select(op="relu") | select(op="add"), ["relu", "add"]),
        (select(op="*l*") & select(module="decoder"), ["relu"]),
        (select(op="*l*") & ~select(module="decoder"), ["linear"]),
        (~select(op="relu") & ~select(op="add") | select(op="add"), ["linear", "add"]),
        (~(select(op="relu") | select(op="add")), ["linear"]),
    ],
    ids=str,
)
def test_ops_are_selected(selection: Selection | None, expected: list[str]) -> None:
    assert seen_by(selection) == expected


def test_backward_ops_are_selected_by_their_own_names_and_those_of_their_forward_ops() -> None:
    everything = seen_by(None, backward=True)
    assert len(everything) > 3
    assert seen_by(select(op="relu"), backward=True) == [
        name for name in everything if "relu" in name.lower()
    ]
    assert seen_by(select(op=everything[0]), backward=True) == everything[:1]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (range(1, 3), [1, 2]),
        (slice(1, None), [1, 2, 3]),
        ([0], [0]),
        (range(9, 12), []),
    ],
)
def test_calls_are_selected_and_counted_in_each_step(calls: Any, expected: list[int]) -> None:
    called: list[tuple[int, int]] = []
    number = step = 0

    def analyse(context: OpContext) -> None:
        context.insert_before_op(lambda *values: called.append((step, number)))

    made = tool(analyse).where(select(op="linear", calls=calls))
    for _ in range(2):
        called.clear()
        with amanda.apply(made):
            for one in range(2):
                for two in range(4):
                    step, number = one, two
                    # The decoder is another outermost module, with calls of its own.
                    model()
                amanda.step()
        assert called == [(step, number) for step in range(2) for number in expected]


def test_an_op_outside_of_any_module_is_in_no_call() -> None:
    assert seen_by(select(op=["relu", "add"], calls=slice(0, None))) == ["relu"]
    assert seen_by(~select(calls=slice(0, None))) == ["add"]


def test_calls_combine_with_other_conditions() -> None:
    assert seen_by(select(calls=[0]) & select(op="relu")) == ["relu"]
    assert seen_by(select(calls=[7]) | select(op="add")) == ["add"]
    assert str(select(calls=[7]) & ~select(op="add")) == "select(calls=[7]) & ~select(op='add')"


def test_listeners_hear_of_calls() -> None:
    heard: list[tuple[str, str, int]] = []
    listening = Tool()
    listening.add_inst_for_call(
        lambda call: heard.append(("begin", call.module, call.number)),
        lambda call: heard.append(("end", call.module, call.number)),
    )
    with amanda.apply(listening):
        model()
        model()
    calls = [(module, number) for number in range(2) for module in ("encoder", "decoder")]
    assert heard == [(point, *call) for call in calls for point in ("begin", "end")]


def test_backward_ops_cannot_be_selected_by_calls() -> None:
    backward = tool(lambda context: None, backward=True).where(~select(calls=[0]))
    with pytest.raises(SelectionError, match="run outside of all calls"), amanda.apply(backward):
        pass


def test_only_selected_ops_are_instrumented() -> None:
    def double(context: OpContext) -> None:
        context.insert_after_op(lambda value: toy.Value(value.data * 2))

    plain = model()
    with amanda.apply(tool(double).where(select(op="linear"))):
        assert model() == 2 * plain
    assert model() == plain


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (range(1, 3), [1, 2]),
        (slice(3, None), [3, 4]),
        (slice(None, None, 2), [0, 2, 4]),
        ([0, 4], [0, 4]),
        (range(10, 20), []),
    ],
)
def test_steps_are_selected(steps: Any, expected: list[int]) -> None:
    called: list[int] = []
    analysed: list[str] = []
    number = 0

    def analyse(context: OpContext) -> None:
        analysed.append(context.op_type)
        context.insert_before_op(lambda *values: called.append(number))

    made = tool(analyse).where(select(op="relu", steps=steps))
    for _ in range(2):  # Steps are counted from 0 for each `apply`; contexts resume.
        called.clear()
        with amanda.apply(made):
            for step in range(5):
                number = step
                model()
                amanda.step()
        assert called == expected
    assert analysed == ["relu"] * bool(expected)


def test_steps_and_ops_combine() -> None:
    called: list[tuple[int, str]] = []
    number = 0

    def analyse(context: OpContext) -> None:
        name = context.op_type
        context.insert_before_op(lambda *values: called.append((number, name)))

    first = select(op="relu") & select(steps=[0])
    late = select(op="add", steps=slice(2, None))
    with amanda.apply(tool(analyse).where(first | late)):
        for step in range(4):
            number = step
            model()
            amanda.step()
    assert called == [(0, "relu"), (2, "add"), (3, "add")]


def test_one_tool_is_restricted_and_another_is_not() -> None:
    order: list[str] = []

    def noting(name: str) -> Callable[[OpContext], None]:
        return lambda context: order.append(f"{name} {context.op_type}")

    one = tool(noting("one")).where(select(op="relu"))
    two = tool(noting("two"))
    two.depends_on(one)
    with amanda.apply(two):
        model()
    assert order == ["two linear", "one relu", "two relu", "two add"]


def test_a_selection_may_change_while_the_tool_is_applied() -> None:
    seen: list[str] = []
    watching = tool(lambda context: context.insert_after_op(lambda *v: seen.append(context.name)))
    with amanda.apply(watching):
        watching.where(select(op="relu"))
        model()
        watching.where(None)
        model()
    assert [name.rpartition("/")[2] for name in seen] == ["relu", "linear", "relu", "add"]


def test_a_selection_that_chose_nothing_is_said() -> None:
    for selection, says in (
        (select(module="encoder.frist"), True),
        (select(module="encoder*", steps=range(7, 9)), True),
        (select(module="encoder*"), False),
    ):
        watching = tool(lambda context: None).where(selection)
        with amanda.apply(watching):
            model()
        (said,) = watching.not_seen() or ["nothing"]
        assert said.startswith(f"{selection} chose nothing that ran") == says
    idle = tool(lambda context: None).where(select(module="encoder.frist"))
    with amanda.apply(idle):
        pass  # Nothing ran that it could have chosen.
    assert idle.not_seen() == []


def test_a_copied_tool_keeps_its_selection() -> None:
    restricted = Tool().where(select(op="relu"))
    again = copy.deepcopy(restricted)
    seen: list[str] = []
    again.add_inst_for_op(lambda context: seen.append(context.op_type))
    with amanda.apply(again):
        model()
    assert seen == ["relu"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: select(op=3),  # type: ignore[arg-type]
        lambda: select(op=["relu", 3]),  # type: ignore[list-item]
        lambda: select(op=[""]),
        lambda: select(module=lambda path: True),  # type: ignore[arg-type]
        lambda: select(steps=3),  # type: ignore[arg-type]
        lambda: select(steps=[-1]),
        lambda: select(steps=slice(0, 10, -1)),
        lambda: select(steps=[1.5]),  # type: ignore[list-item]
        lambda: select("conv*"),  # type: ignore[arg-type]
        lambda: select(select(op="relu")),
        lambda: Tool().where("relu"),  # type: ignore[arg-type]
        lambda: Tool().where(lambda context: True),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_selection_is_refused(wrong: Callable[[], Any]) -> None:
    with pytest.raises(SelectionError, match=r"bad-selection"):
        wrong()


def test_wrong_namespaces_are_refused_when_selected() -> None:
    with pytest.raises(NamespaceError):
        select(namespace="toy//eager")


def test_only_selections_combine() -> None:
    with pytest.raises(TypeError):
        select(op="relu") & (lambda context: True)  # type: ignore[operator]
    with pytest.raises(TypeError):
        select(op="relu") | "add"  # type: ignore[operator]


def test_exceptions_of_predicates_come_out() -> None:
    def failing(context: OpContext) -> bool:
        raise LookupError("mine")

    failing_tool = tool(lambda context: None).where(select(failing))
    with amanda.apply(failing_tool), pytest.raises(LookupError, match="mine"):
        model()
