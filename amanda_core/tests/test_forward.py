"""Forward actions: what a routine gets, what its result means, and where gradients flow."""

from __future__ import annotations

from typing import Any

import pytest

import amanda
from amanda_core import OpContext
from amanda_core.driver_kit.execution import OpRecord
from amanda_core.testing.toy import framework as toy

from .making import session_of, tool

pytestmark = pytest.mark.usefixtures("driver")


def test_insert_before_op_edits_the_selected_input() -> None:
    def halve_weight(context: OpContext) -> None:
        context.insert_before_op(lambda w: toy.Value(w.data * 0.5), inputs=[1])

    with amanda.apply(tool(halve_weight)):
        y = toy.linear(toy.Value(2.0), toy.Value(3.0), toy.Value(1.0))
    assert y.data == 2.0 * 1.5 + 1.0


def test_insert_after_op_edits_the_selected_output() -> None:
    def negate_second(context: OpContext) -> None:
        context.insert_after_op(lambda y: toy.Value(-y.data), outputs=[1])

    with amanda.apply(tool(negate_second, require_outputs=True)):
        first, second = toy.pair(toy.Value(3.0))
    assert (first.data, second.data) == (4.0, -6.0)


def test_insert_after_op_may_be_asked_for_before_the_op() -> None:
    with amanda.apply(tool(lambda c: c.insert_after_op(lambda y: toy.Value(y.data + 10)))):
        assert toy.relu(toy.Value(-1.0)).data == 10.0


def test_replace_op_gets_the_selected_inputs_and_returns_the_outputs() -> None:
    got: list[Any] = []

    def weight_only(w: toy.Value) -> toy.Value:
        got.append(w.data)
        return toy.Value(w.data + 100)

    with amanda.apply(tool(lambda c: c.replace_op(weight_only, inputs=[1]))):
        y = toy.linear(toy.Value(2.0), toy.Value(3.0))
    assert (got, y.data) == ([3.0], 103.0)


def test_replacing_by_the_identity_removes_an_op() -> None:
    x = toy.Value(-5.0)
    with amanda.apply(tool(lambda c: c.replace_op(lambda x: x))):
        assert toy.relu(x).data == -5.0


def test_steps_before_a_replacement_feed_it() -> None:
    def analyse(context: OpContext) -> None:
        context.insert_before_op(lambda x: toy.Value(x.data + 1))
        context.replace_op(lambda x: toy.Value(x.data * 10))
        context.insert_after_op(lambda y: toy.Value(y.data + 2))

    with amanda.apply(tool(analyse)):
        assert toy.relu(toy.Value(4.0)).data == (4 + 1) * 10 + 2


def test_no_positions_mean_all_and_arguments_not_given_appear_as_their_default() -> None:
    got: list[tuple[Any, ...]] = []
    x, w = toy.Value(2.0), toy.Value(3.0)
    with amanda.apply(tool(lambda c: c.insert_before_op(lambda *values: got.append(values)))):
        toy.linear(x, w)
    assert got == [(x, w, None)]


def test_positions_are_given_in_the_order_asked_for() -> None:
    got: list[float] = []

    def take(w: toy.Value, x: toy.Value) -> tuple[toy.Value, toy.Value]:
        got.extend((w.data, x.data))
        return toy.Value(10.0), toy.Value(1.0)  # w, x

    with amanda.apply(tool(lambda c: c.insert_before_op(take, inputs=[1, 0]))):
        y = toy.linear(toy.Value(2.0), toy.Value(3.0), toy.Value(0.5))
    assert got == [3.0, 2.0]
    assert y.data == 10.0 * 1.0 + 0.5


def test_a_list_of_tensors_is_one_position() -> None:
    got: list[Any] = []

    def last_only(values: list[toy.Value]) -> list[toy.Value]:
        got.append([v.data for v in values])
        return [toy.Value(0.0), values[1]]

    with amanda.apply(tool(lambda c: c.insert_before_op(last_only))):
        y = toy.total([toy.Value(1.0), toy.Value(2.0)])
    assert (got, y.data) == ([[1.0, 2.0]], 2.0)


def test_a_routine_that_returns_none_changes_nothing() -> None:
    x = toy.Value(2.0)
    with amanda.apply(tool(lambda c: c.insert_before_op(lambda *values: None))):
        assert toy.add(x, x).data == 4.0


def test_keyword_arguments_are_passed_by_reference() -> None:
    mask = [1.0]

    def apply_mask(w: toy.Value, mask: list[float]) -> toy.Value:
        return toy.Value(w.data * mask[0])

    def model() -> float:
        return toy.relu(toy.Value(3.0)).data

    with amanda.apply(tool(lambda c: c.insert_before_op(apply_mask, mask=mask))):
        assert model() == 3.0
        mask[0] = 2.0
        assert model() == 6.0


def test_steps_run_in_tool_order_each_on_what_the_earlier_made() -> None:
    first = tool(lambda c: c.insert_before_op(lambda x: toy.Value(x.data + 1)))
    second = tool(lambda c: c.insert_before_op(lambda x: toy.Value(x.data * 2)))
    with amanda.apply(first, second):
        assert toy.relu(toy.Value(3.0)).data == (3 + 1) * 2
    with amanda.apply(second, first):
        assert toy.relu(toy.Value(3.0)).data == 3 * 2 + 1


class Watcher(amanda.Tool):
    """Notes what it is given, outside of all other tools."""

    outermost = True

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        context.insert_before_op(self.look)
        context.insert_after_op(self.look)
        context.insert_before_backward_op(self.look)
        context.insert_after_backward_op(self.look)

    def look(self, value: Any) -> None:
        self.seen.append(value.data if isinstance(value, toy.Value) else value)


@pytest.mark.parametrize("given_first", [True, False])
def test_an_outermost_tool_sees_what_the_program_gives_and_gets(given_first: bool) -> None:
    def analyse(context: OpContext) -> None:
        context.insert_before_op(lambda x: toy.Value(x.data + 10))
        context.insert_after_op(lambda x: toy.Value(x.data + 10))
        context.insert_before_backward_op(lambda gradient: gradient + 10)
        context.insert_after_backward_op(lambda gradient: gradient + 10)

    watcher, editor = Watcher(), tool(analyse)
    x = toy.parameter(3.0)
    with amanda.apply(*((watcher, editor) if given_first else (editor, watcher))):
        y = toy.relu(x)
        toy.backward(y)
    assert y.data == 23.0
    assert watcher.seen == [3.0, 23.0, 1.0, x.grad]
    assert x.grad == 21.0


def test_an_action_takes_effect_in_the_very_execution_in_which_it_was_asked_for() -> None:
    results = []
    with amanda.apply(tool(lambda c: c.insert_before_op(lambda x: toy.Value(9.0)))):
        for _ in range(3):
            results.append(toy.relu(toy.Value(1.0)).data)  # noqa: PERF401  One call site.
    assert results == [9.0, 9.0, 9.0]


# Autodiff: x = 2, w = 3, w edited to 1.5.


def _halved_weight_gradients(differentiated: bool) -> tuple[float | None, float | None]:
    def analyse(context: OpContext) -> None:
        half = toy.Value(0.5)
        if differentiated:
            with amanda.autodiff_enabled():
                context.insert_before_op(lambda w: toy.mul(w, half), inputs=[1])
        else:
            context.insert_before_op(lambda w: toy.mul(w, half), inputs=[1])

    x, w = toy.parameter(2.0), toy.parameter(3.0)
    with amanda.apply(tool(lambda c: analyse(c) if c.op_type == "linear" else None)):
        y = toy.linear(x, w)
        toy.backward(y)
    assert y.data == 3.0
    return x.grad, w.grad


def test_edits_are_straight_through_by_default() -> None:
    # The op's own formula sees the edited weight; the gradient goes to the original one unscaled.
    assert _halved_weight_gradients(differentiated=False) == (1.5, 2.0)


def test_autodiff_enabled_differentiates_inserted_code() -> None:
    assert _halved_weight_gradients(differentiated=True) == (1.5, 2.0 * 0.5)


def test_autodiff_is_sampled_when_the_action_is_recorded() -> None:
    w = toy.parameter(3.0)
    doubled = tool(lambda c: c.insert_before_op(lambda x: toy.add(x, x)))
    with amanda.apply(doubled), amanda.autodiff_enabled():
        for _ in range(2):
            y = toy.relu(w)
            with amanda.autodiff_disabled():  # Too late for what is recorded.
                toy.backward(y)
    assert w.grad == 2.0 + 2.0

    w = toy.parameter(3.0)
    doubled.invalidate()
    with amanda.apply(doubled):
        for run in range(2):
            with amanda.autodiff_enabled() if run else amanda.autodiff_disabled():
                toy.backward(toy.relu(w))
    assert w.grad == 1.0 + 1.0


def test_a_replacement_is_differentiated_as_written() -> None:
    x, y = toy.parameter(2.0), toy.parameter(5.0)
    with amanda.apply(tool(lambda c: c.replace_op(toy.add))):
        z = toy.mul(x, y)
        toy.backward(z)
    assert (z.data, x.grad, y.grad) == (7.0, 1.0, 1.0)


# Plans.


def test_analysis_runs_once_per_op_and_its_routines_each_time() -> None:
    analysed: list[str] = []
    executed: list[str] = []

    def analyse(context: OpContext) -> None:
        analysed.append(context.op_type)
        context.insert_before_op(lambda *values: executed.append(context.op_type))

    def model() -> None:
        toy.relu(toy.add(toy.Value(1.0), toy.Value(2.0)))

    with amanda.apply(tool(analyse)):
        for _ in range(3):
            model()
    assert analysed == ["add", "relu"]
    assert executed == ["add", "relu"] * 3


def test_a_driver_may_skip_an_op_for_one_epoch() -> None:
    chosen = tool(lambda c: c.insert_before_op(abs) if c.op_type == "none" else None)

    def model() -> None:
        toy.relu(toy.Value(1.0))

    with amanda.apply(chosen) as handle:
        session = session_of(handle)
        records: dict[object, OpRecord] = session.persistent("toy.records", dict)
        model()
        ((key, record),) = records.items()
        assert record.is_idle(session)
        (context,) = session.contexts()
        model()
        chosen.invalidate()
        assert not record.is_idle(session)
        model()
        assert record.is_idle(session)
        assert records == {key: record}
        assert list(session.contexts()) == [context]


def test_a_routine_may_run_operators_which_are_not_instrumented() -> None:
    seen: list[str] = []

    def analyse(context: OpContext) -> None:
        seen.append(context.op_type)
        toy.relu(toy.Value(1.0))
        context.insert_before_op(lambda x, y: (toy.mul(x, x), y))

    with amanda.apply(tool(analyse)):
        assert toy.add(toy.Value(3.0), toy.Value(1.0)).data == 10.0
    assert seen == ["add"]
