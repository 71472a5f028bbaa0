"""Contexts: what they tell, how long they are valid, and what forward and backward share."""

from __future__ import annotations

import enum
import gc
import weakref
from typing import Any

import pytest

import amanda
from amanda_core import IPoint, OpContext
from amanda_core.errors import PositionError, StaleContextError
from amanda_core.runtime.weak import strongly, weakly
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy.driver import ToyDriver

from .making import session_of, site, tool

pytestmark = pytest.mark.usefixtures("driver")


def test_inspection_of_a_forward_op() -> None:
    x, w = toy.Value(2.0), toy.Value(3.0)
    seen: list[OpContext] = []

    def before(context: OpContext) -> None:
        assert context.get_op() is toy.LINEAR
        assert context.get_inputs() == [x, w, None]
        assert context.get_outputs() is None
        assert context.get_backward_op() is None
        assert context.get_backward_op_id() is None
        assert context.get_grad_outputs() is None
        assert context.get_grad_inputs() is None
        assert context.is_forward()
        assert not context.is_backward()
        assert context.namespace == "toy/1.2.3/eager"
        assert context.module_path == "encoder.query"
        assert context.name == "encoder.query/linear"
        assert context.source is not None
        assert context.source.startswith("test_context.py:")
        assert context.input_names == ("x", "w", "b")
        assert context.zone == "model"
        assert not context.recomputed
        seen.append(context)

    def after(context: OpContext) -> None:
        (output,) = context.get_outputs()
        assert output.data == 6.0
        assert context.get_inputs() == [x, w, None]

    both = tool(before)
    both.add_inst_for_op(after, require_outputs=True)
    with amanda.apply(both), toy.scope("encoder"), toy.scope("query"):
        toy.linear(x, w)
    assert len(seen) == 1


def test_inspection_of_a_backward_op() -> None:
    x, w = toy.parameter(2.0), toy.parameter(3.0)
    seen: list[str] = []

    def before(context: OpContext) -> None:
        if context.op_type == "ProductBackward":
            assert context.get_op() is toy.LINEAR
            assert context.get_backward_op().name == "ProductBackward"
            assert context.get_grad_outputs() == [5.0]
            assert context.get_grad_inputs() is None
            assert context.input_names == ("x", "w", "b")
            assert context.get_op_id() != context.get_backward_op_id()
            seen.append("before")

    def after(context: OpContext) -> None:
        if context.op_type == "ProductBackward":
            assert context.get_grad_inputs() == [15.0, 10.0]
            seen.append("after")

    both = tool(before, backward=True)
    both.add_inst_for_op(after, backward=True, require_outputs=True)
    with amanda.apply(both):
        toy.backward(toy.linear(x, w), 5.0)
    assert seen == ["before", "after"]


def test_properties_are_the_methods_of_the_same_name() -> None:
    seen: list[bool] = []

    def analyse(context: OpContext) -> None:
        for name in (
            "op",
            "op_id",
            "inputs",
            "outputs",
            "backward_op",
            "backward_op_id",
            "grad_outputs",
            "grad_inputs",
        ):
            assert getattr(context, name) == getattr(context, f"get_{name}")()
        seen.append(context.is_backward())

    both = tool(analyse, require_outputs=True)
    both.add_inst_for_op(analyse, backward=True, require_outputs=True)
    with amanda.apply(both):
        toy.backward(toy.relu(toy.Value(1.0, toy.parameter(1.0).edge)))
    assert seen == [False, True, True]


def test_type_and_backward_type_are_in_every_context() -> None:
    seen: list[tuple[str, Any, Any]] = []

    def analyse(context: OpContext) -> None:
        assert "type" in context
        assert "backward_type" in context
        seen.append((context.op_type, context["type"], context["backward_type"]))

    both = tool(analyse)
    both.add_inst_for_op(analyse, backward=True)
    with amanda.apply(both):
        first, _ = toy.pair(toy.parameter(1.0))  # Has no word in the vocabulary.
        toy.backward(toy.relu(first))
    assert seen == [
        ("pair", None, None),
        ("relu", "relu", None),
        ("ReluBackward", "relu", "relu_backward"),
        ("PairBackward", None, None),
        ("AccumulateGrad", None, None),
    ]


def forward_and_backward(session: Any) -> tuple[OpContext, OpContext]:
    forward = session.open(site("f"), None, [1.0])
    return forward, session.open(site("b"), None, forward=forward, backward=True)


def test_backward_context_reads_through_and_writes_locally() -> None:
    with amanda.apply() as handle:
        forward, backward = forward_and_backward(session_of(handle))
        forward["mask"] = "forward"
        assert backward["mask"] == "forward"
        assert "mask" in backward
        assert backward.get("mask") == "forward"
        assert backward.get("none", 7) == 7
        assert backward.setdefault("mask", "other") == "forward"
        assert "mask" not in dict(backward)
        with pytest.raises(KeyError):
            backward["none"]

        backward["mask"] = "backward"
        backward["own"] = 1
        assert backward["mask"] == "backward"
        assert forward["mask"] == "forward"
        assert "own" not in forward
        assert backward.setdefault("new", []) == []
        assert "new" not in forward


def test_contexts_hash_and_compare_by_identity() -> None:
    with amanda.apply() as handle:
        forward, backward = forward_and_backward(session_of(handle))
        other = session_of(handle).open(site("g"), None, [1.0])
        assert dict(forward) == dict(other)
        assert forward != other
        assert not forward == other  # noqa: SIM201  `==` is what is tested.
        assert len({forward, backward, other}) == 3
        place = {forward: "forward", backward: "backward"}
        forward["key"] = 1
        assert place[forward] == "forward"


def test_one_context_per_op_whose_keys_persist() -> None:
    seen: list[OpContext] = []

    def analyse(context: OpContext) -> None:
        context["count"] = context.get("count", 0) + 1
        seen.append(context)

    with amanda.apply(tool(analyse)), amanda.cache_disabled():
        for _ in range(3):
            toy.relu(toy.Value(1.0))
    assert seen[0] is seen[1] is seen[2]
    assert seen[0]["count"] == 3


def test_an_op_has_one_stacked_context_in_nested_apply() -> None:
    seen: list[OpContext] = []
    with amanda.apply(tool(seen.append)), amanda.apply(tool(seen.append)):
        toy.relu(toy.Value(1.0))
    assert len(seen) == 2
    assert seen[0] is seen[1]


@pytest.mark.parametrize("what", ["inputs", "outputs"])
def test_stale_tensors_of_a_forward_context_are_an_error(what: str) -> None:
    kept: list[OpContext] = []
    with amanda.apply(tool(kept.append)):
        toy.relu(toy.Value(1.0))
        with pytest.raises(StaleContextError, match=rf"{what} of this op.*relu"):
            getattr(kept[0], f"get_{what}")()
    with pytest.raises(StaleContextError):
        getattr(kept[0], what)
    assert kept[0].get_op() is toy.RELU


@pytest.mark.parametrize("what", ["inputs", "grad_outputs", "grad_inputs"])
def test_stale_tensors_of_a_backward_context_are_an_error(what: str) -> None:
    kept: list[OpContext] = []
    with amanda.apply(tool(kept.append, backward=True)):
        toy.backward(toy.relu(toy.parameter(1.0)))
        with pytest.raises(StaleContextError):
            getattr(kept[0], f"get_{what}")()


def test_a_backward_context_finds_what_is_still_alive_of_its_forward_op() -> None:
    seen: list[Any] = []

    def analyse(context: OpContext) -> None:
        if context.op_type == "AddBackward":
            seen.extend(context.get_inputs())

    w = toy.parameter(3.0)
    with amanda.apply(tool(analyse, backward=True)):
        y = toy.add(toy.mul(w, w), w)
        gc.collect()
        toy.backward(y)
    assert seen == [None, w]


def test_what_may_refer_to_other_values_is_remembered_weakly_or_not_at_all() -> None:
    class Level(enum.IntEnum):
        ONE = 1

    kept = [1, 2.0, "a", None, ..., Level.ONE, slice(1, None)]
    assert strongly(weakly(kept)) == kept
    assert strongly(weakly((kept, (3,)))) == [kept, [3]]
    assert strongly(weakly([{"a": 1}, slice([], None)])) == [None, None]


def test_contexts_hold_tensors_weakly() -> None:
    kept: list[OpContext] = []
    x = toy.Value(1.0)
    alive = weakref.ref(x)
    with amanda.apply(tool(kept.append), tool(kept.append, require_outputs=True)):
        y = toy.total([x])
        result = weakref.ref(y)
        del x, y
        gc.collect()
        assert (alive(), result()) == (None, None)
        assert kept[0]["type"] == "sum"


def test_value_gives_what_the_driver_knows_to_be_constant() -> None:
    with amanda.apply() as handle:
        context = session_of(handle).open(
            site(), None, ["symbol x", "symbol w"], constant={"symbol x": None, "symbol w": 3.0}.get
        )
        assert context.value(0) is None
        assert context.value(1) == 3.0
        with pytest.raises(PositionError, match=r"no input 2"):
            context.value(2)
        eager = session_of(handle).open(site("eager"), None, [1.0, 2.0])
        assert eager.value(1) == 2.0
        _, backward = forward_and_backward(session_of(handle))
        assert backward.value(0) == 1.0


def test_plugins_prepare_each_context_once(driver: ToyDriver) -> None:
    with amanda.apply(tool(lambda c: None)), amanda.cache_disabled():
        for _ in range(2):
            toy.relu(toy.Value(1.0))
    assert driver.prepared == ["relu"]


def test_a_context_that_could_not_be_prepared_is_prepared_again(
    driver: ToyDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(op_type: str) -> None:
        raise ValueError(op_type)

    class Failing(list[str]):
        def append(self, op_type: str) -> None:
            raise ValueError(op_type)

    monkeypatch.setattr(driver, "prepared", Failing())
    with amanda.apply() as handle:
        session = session_of(handle)
        with pytest.raises(ValueError, match="linear"):
            session.open(site(), None, [1.0])
        monkeypatch.setattr(driver, "prepared", [])
        assert session.open(site(), None, [1.0])["type"] == "linear"


def test_recomputation_is_flagged_also_to_the_backward_context() -> None:
    with amanda.apply() as handle:
        session = session_of(handle)
        forward = session.open(site("f"), None, [1.0], recomputed=True)
        backward = session.open(site("b"), None, forward=forward, backward=True)
        assert forward.recomputed
        assert backward.recomputed
        assert not session.open(site("f"), None, [1.0]).recomputed


def test_attributes_are_not_positions() -> None:
    with amanda.apply() as handle:
        forward = session_of(handle).open(site(), None, [1.0], attrs={"axis": 1})
        assert forward.attrs == {"axis": 1}
        assert forward.get_inputs() == [1.0]


def test_a_plan_is_an_ordered_tuple_of_steps_and_a_fold_over_values() -> None:
    def analyse(context: OpContext) -> None:
        context.insert_before_op(lambda x: x + 1, inputs=[1])
        context.insert_before_op(lambda x, y: (y, x))

    with amanda.apply(tool(analyse)) as handle:
        context = session_of(handle).open(site(), None, [1.0, 2.0])
        plan = context.trigger_callback(IPoint.BEFORE_FORWARD)
        assert isinstance(plan.steps, tuple)
        assert [step.action.positions for step in plan] == [(1,), None]
        assert (len(plan), bool(plan)) == (2, True)
        values = [1.0, 2.0]
        assert plan(values) == [3.0, 1.0]
        assert values == [1.0, 2.0]
        # A driver may walk the steps instead; each tells what it changed.
        first, second = plan
        assert first(values) == [(1, 3.0)]
        assert second([1.0, 3.0]) == [(0, 3.0), (1, 1.0)]
        same = 5.0
        assert second([same, same]) == []


def test_the_plan_of_a_point_without_actions_is_empty() -> None:
    with amanda.apply(tool(lambda c: None)) as handle:
        context = session_of(handle).open(site(), None, [1.0])
        plan = context.trigger_callback(IPoint.BEFORE_FORWARD)
        assert not plan
        assert plan.replacement is None
        assert plan([1.0]) == [1.0]


def test_a_driver_that_does_not_tell_where_tensors_lie_has_no_weights() -> None:
    seen = []

    def analyse(context: OpContext) -> None:
        assert dict(context.weights) == {}
        assert context.weights.shapes() == {}
        seen.append((context.weights.supported, context.weights.consumed))

    def look(context: OpContext) -> None:
        context.insert_before_op(lambda *values: analyse(context), observe=True)

    with amanda.apply(tool(analyse), tool(look)), toy.scope("encoder"):
        toy.linear(toy.Value(2.0), toy.Value(3.0))
    assert seen == [(False, False)] * 2
